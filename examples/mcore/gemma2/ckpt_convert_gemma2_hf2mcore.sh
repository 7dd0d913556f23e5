#!/usr/bin/env bash
# Gemma 2, Hugging Face -> Megatron: Gemma-2-9B (42 layers) over 8 tensor parallel ranks.
#   bash examples/mcore/gemma2/ckpt_convert_gemma2_hf2mcore.sh [more flags ...]
# Environment: LOAD_DIR (the model's folder), SAVE_DIR (a new folder), TP, PP. Relative paths start at the root of the
# repository.
# Training has to be started with the same numbers. Append --dry-run to see what would be written, without writing it.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

LOAD_DIR="${LOAD_DIR:-./model_from_hf/gemma2_hf/}"
SAVE_DIR="${SAVE_DIR:-./model_weights/gemma2_mcore/}"
TP="${TP:-8}"
PP="${PP:-1}"

python ./convert_ckpt_v2.py \
    --load-model-type hf \
    --save-model-type mg \
    --model-type-hf gemma2 \
    --load-dir "$LOAD_DIR" \
    --save-dir "$SAVE_DIR" \
    --target-tensor-parallel-size "$TP" \
    --target-pipeline-parallel-size "$PP" \
    "$@"
