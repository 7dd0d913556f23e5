#!/usr/bin/env bash
# Qwen3-MoE, Hugging Face -> Megatron: Qwen3-30B-A3B (48 layers, 128 experts) on 8 pipeline stages.
#   bash examples/mcore/qwen3_moe/ckpt_convert_qwen3_moe_hf2mcore.sh [more flags ...]
# Environment: LOAD_DIR (the model's folder), SAVE_DIR (a new folder), TP, PP, EP. Relative paths start at the root of
# the repository.
# Training has to be started with the same numbers. Append --dry-run to see what would be written, without writing it.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

LOAD_DIR="${LOAD_DIR:-./model_from_hf/qwen3_moe_hf/}"
SAVE_DIR="${SAVE_DIR:-./model_weights/qwen3_moe_mcore/}"
TP="${TP:-1}"
PP="${PP:-8}"
EP="${EP:-1}"

python ./convert_ckpt_v2.py \
    --load-model-type hf \
    --save-model-type mg \
    --model-type-hf qwen3-moe \
    --load-dir "$LOAD_DIR" \
    --save-dir "$SAVE_DIR" \
    --target-tensor-parallel-size "$TP" \
    --target-pipeline-parallel-size "$PP" \
    --target-expert-parallel-size "$EP" \
    --moe-grouped-gemm \
    "$@"
