#!/usr/bin/env bash
# Score Llama-2-7B on a benchmark with 2 devices (TP 2, PP 1); Ascend NPU or CUDA.
#   bash examples/mcore/llama2/evaluate_llama2_7b_ptd.sh [more flags of evaluation.py ...]
# Environment: NPUS_PER_NODE, NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT, TOKENIZER_PATH, CKPT_LOAD_DIR, DATA_PATH,
# TASK, PROMPT_TYPE, TP, PP. Of a flag given twice the last one counts: append what shall differ, --check too. Relative
# paths start at the root of the repository.
# Results go to --output-dir, by default to a folder below ./output/evaluation. A run that was ended goes on where it
# was when the same command is given again. More devices hold more copies of the model, which share the questions.
# The same in short, with all sizes of the model from its config.json:
#   torchrun --nproc_per_node 2 evaluation.py --use-mcore-models --load ./model_from_hf/llama2_hf/ \
#       --tensor-model-parallel-size 2 --bf16 --task mmlu --task-data-path ./mmlu/test/
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
source examples/mcore/env_config.sh

NPUS_PER_NODE="${NPUS_PER_NODE:-2}"
NNODES="${NNODES:-1}"
NODE_RANK="${NODE_RANK:-0}"
MASTER_ADDR="${MASTER_ADDR:-localhost}"
MASTER_PORT="${MASTER_PORT:-6000}"

TOKENIZER_PATH="${TOKENIZER_PATH:-./model_from_hf/llama2_hf/}"
# A Hugging Face directory, or a folder of Megatron checkpoints, of whatever ranks.
CKPT_LOAD_DIR="${CKPT_LOAD_DIR:-./model_from_hf/llama2_hf/}"
# One benchmark, or several with a path for each, all in quotes.
DATA_PATH="${DATA_PATH:-./mmlu/test/}"
TASK="${TASK:-mmlu}"
# Chat template; empty: questions are asked in plain text.
PROMPT_TYPE="${PROMPT_TYPE-}"

TP="${TP:-2}"
PP="${PP:-1}"

DISTRIBUTED_ARGS=(
    --nproc_per_node "$NPUS_PER_NODE" --nnodes "$NNODES" --node_rank "$NODE_RANK"
    --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT"
)

MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size "$TP"
    --pipeline-model-parallel-size "$PP"
)

GPT_ARGS=(
    --use-mcore-models
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008
    --num-attention-heads 32 --kv-channels 128
    --padded-vocab-size 32000 --max-position-embeddings 4096
    --position-embedding-type rope --rotary-base 10000
    --normalization RMSNorm --norm-epsilon 1e-5
    --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights
)

# Each word is a benchmark, or a path.
read -ra TASKS <<<"$TASK"
read -ra DATA_PATHS <<<"$DATA_PATH"
EVALUATE_ARGS=(
    --task "${TASKS[@]}" --task-data-path "${DATA_PATHS[@]}"
    --evaluation-batch-size 8
    --load "$CKPT_LOAD_DIR" --bf16
    --use-flash-attn --use-fused-rotary-pos-emb --use-fused-swiglu --use-fused-rmsnorm
    --tokenizer-type PretrainedFromHF --tokenizer-name-or-path "$TOKENIZER_PATH"
)

if [[ -n "$PROMPT_TYPE" ]]; then
    EVALUATE_ARGS+=(--prompt-type "$PROMPT_TYPE")
fi

mkdir -p logs
# pipefail: the exit code is torchrun's, not tee's.
torchrun "${DISTRIBUTED_ARGS[@]}" evaluation.py \
    "${MODEL_PARALLEL_ARGS[@]}" \
    "${GPT_ARGS[@]}" \
    "${EVALUATE_ARGS[@]}" \
    "$@" 2>&1 | tee "logs/evaluate_llama2_7b_ptd_$(date +%Y%m%d_%H%M%S).log"
