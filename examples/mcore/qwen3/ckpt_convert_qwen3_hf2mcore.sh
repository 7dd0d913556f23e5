#!/usr/bin/env bash
# Qwen3 (dense), Hugging Face -> Megatron: Qwen3-32B (64 layers) on 8 pipeline stages.
#   bash examples/mcore/qwen3/ckpt_convert_qwen3_hf2mcore.sh [more flags ...]
# Environment: LOAD_DIR (the model's folder), SAVE_DIR (a new folder), TP, PP. Relative paths start at the root of the
# repository.
# A number of layers that PP does not divide is refused with the list to append (Qwen3-8B has 36: --num-layer-list
# 5,5,5,5,4,4,4,4).
# Training has to be started with the same numbers. Append --dry-run to see what would be written, without writing it.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

LOAD_DIR="${LOAD_DIR:-./model_from_hf/qwen3_hf/}"
SAVE_DIR="${SAVE_DIR:-./model_weights/qwen3_mcore/}"
TP="${TP:-1}"
PP="${PP:-8}"

python ./convert_ckpt_v2.py \
    --load-model-type hf \
    --save-model-type mg \
    --model-type-hf qwen3 \
    --load-dir "$LOAD_DIR" \
    --save-dir "$SAVE_DIR" \
    --target-tensor-parallel-size "$TP" \
    --target-pipeline-parallel-size "$PP" \
    "$@"
