#!/usr/bin/env bash
# Talk to Qwen3-235B-A22B on 16 devices (TP 1, PP 1, EP 16); Ascend NPU or CUDA.
#   bash examples/mcore/qwen3_moe/generate_qwen3_235b_a22b_A3_ptd.sh [more flags of inference.py ...]
# Environment: NPUS_PER_NODE, NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT, TOKENIZER_PATH, CKPT_LOAD_DIR, TASK,
# PROMPT_TYPE, TP, PP, EP. Of a flag given twice the last one counts: append what shall differ, --check too. Relative
# paths start at the root of the repository.
# TASK greedy answers a file instead: append --prompt-file FILE --output-file FILE. More devices hold more copies of the
# model, which share the file. --serve answers clients of OpenAI's interface.
# The same in short, with all sizes of the model from its config.json:
#   torchrun --nproc_per_node 16 inference.py --use-mcore-models --load ./model_from_hf/qwen3_moe_235b_hf/ \
#       --expert-model-parallel-size 16 --moe-token-dispatcher-type alltoall --moe-grouped-gemm --bf16 --task chat \
#       --max-new-tokens 256 --prompt-type qwen3
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
source examples/mcore/env_config.sh

NPUS_PER_NODE="${NPUS_PER_NODE:-16}"
NNODES="${NNODES:-1}"
NODE_RANK="${NODE_RANK:-0}"
MASTER_ADDR="${MASTER_ADDR:-localhost}"
MASTER_PORT="${MASTER_PORT:-6000}"

TOKENIZER_PATH="${TOKENIZER_PATH:-./model_from_hf/qwen3_moe_235b_hf/}"
# A Hugging Face directory, or a folder of Megatron checkpoints, of whatever ranks.
CKPT_LOAD_DIR="${CKPT_LOAD_DIR:-./model_from_hf/qwen3_moe_235b_hf/}"
TASK="${TASK:-chat}"
# Chat template; empty: texts are continued as they are.
PROMPT_TYPE="${PROMPT_TYPE-qwen3}"

TP="${TP:-1}"
PP="${PP:-1}"
EP="${EP:-16}"

DISTRIBUTED_ARGS=(
    --nproc_per_node "$NPUS_PER_NODE" --nnodes "$NNODES" --node_rank "$NODE_RANK"
    --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT"
)

MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size "$TP"
    --pipeline-model-parallel-size "$PP"
    --expert-model-parallel-size "$EP"
)

GPT_ARGS=(
    --use-mcore-models
    --spec mindspeed_llm.tasks.models.spec.qwen3_spec layer_spec
    --num-layers 94 --hidden-size 4096 --ffn-hidden-size 12288
    --num-attention-heads 64 --group-query-attention --num-query-groups 4 --kv-channels 128
    --padded-vocab-size 151936 --max-position-embeddings 40960
    --position-embedding-type rope --rotary-base 1000000
    --normalization RMSNorm --norm-epsilon 1e-6 --qk-layernorm
    --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights
)

MOE_ARGS=(
    --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 1536
    --norm-topk-prob
    --moe-token-dispatcher-type alltoall --moe-grouped-gemm
)

GENERATE_ARGS=(
    --task "$TASK" --max-new-tokens 256
    --load "$CKPT_LOAD_DIR" --bf16 --seed 42
    --use-flash-attn --use-fused-rotary-pos-emb --use-fused-swiglu --use-fused-rmsnorm
    --tokenizer-type PretrainedFromHF --tokenizer-name-or-path "$TOKENIZER_PATH"
)

if [[ -n "$PROMPT_TYPE" ]]; then
    GENERATE_ARGS+=(--prompt-type "$PROMPT_TYPE")
fi

mkdir -p logs
# pipefail: the exit code is torchrun's, not tee's.
torchrun "${DISTRIBUTED_ARGS[@]}" inference.py \
    "${MODEL_PARALLEL_ARGS[@]}" \
    "${GPT_ARGS[@]}" \
    "${MOE_ARGS[@]}" \
    "${GENERATE_ARGS[@]}" \
    "$@" 2>&1 | tee "logs/generate_qwen3_235b_a22b_A3_ptd_$(date +%Y%m%d_%H%M%S).log"
