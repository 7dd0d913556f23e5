#!/usr/bin/env bash
# Pre-train Qwen3-32B on 16 devices (Ascend A3; CUDA and CPU work too, with NPUS_PER_NODE processes):
#   bash examples/fsdp2/qwen3/pretrain_qwen3_32b_4k_fsdp2_A3.sh [--section.field value ...]
# Environment: NPUS_PER_NODE, NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT, MODEL_PATH, DATA_PATH, OUTPUT_DIR, MBS, GA.
# Relative paths start at the root of the repository.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
source examples/fsdp2/env_config.sh
export TORCH_HCCL_ZERO_COPY="${TORCH_HCCL_ZERO_COPY:-1}"

NPUS_PER_NODE="${NPUS_PER_NODE:-16}"
NNODES="${NNODES:-1}"
NODE_RANK="${NODE_RANK:-0}"
MASTER_ADDR="${MASTER_ADDR:-localhost}"
MASTER_PORT="${MASTER_PORT:-6499}"

MODEL_PATH="${MODEL_PATH:-./model_from_hf/qwen3-32b_hf/}"
# One file, or a folder, of jsonl, json, parquet, csv or txt.
DATA_PATH="${DATA_PATH:-./dataset/train-00000-of-00001.parquet}"
OUTPUT_DIR="${OUTPUT_DIR:-./output}"
MBS="${MBS:-1}"
GA="${GA:-1}"

mkdir -p logs
# pipefail: the exit code is torchrun's, not tee's.
torchrun \
    --nproc_per_node "$NPUS_PER_NODE" \
    --nnodes "$NNODES" \
    --node_rank "$NODE_RANK" \
    --master_addr "$MASTER_ADDR" \
    --master_port "$MASTER_PORT" \
    train_fsdp2.py examples/fsdp2/qwen3/pretrain_qwen3_32b_4k_fsdp2_A3.yaml \
    --model.model_name_or_path "$MODEL_PATH" \
    --data.dataset "{\"file_name\": \"$DATA_PATH\"}" \
    --parallel.fsdp_size $((NPUS_PER_NODE * NNODES)) \
    --training.per_device_train_batch_size "$MBS" \
    --training.gradient_accumulation_steps "$GA" \
    --training.output_dir "$OUTPUT_DIR" \
    --optimization.use_fused_rmsnorm true \
    --optimization.use_fused_rotary_pos_emb true \
    --optimization.use_flash_attn true \
    "$@" 2>&1 | tee "logs/pretrain_qwen3_32b_4k_$(date +%Y%m%d_%H%M%S).log"
