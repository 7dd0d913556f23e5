#!/usr/bin/env bash
# Phi-3.5-mini, Hugging Face -> Megatron: 32 layers over 2 tensor parallel ranks and 2 pipeline stages.
#   bash examples/mcore/phi35/ckpt_convert_phi35_mini_hf2mcore.sh [more flags ...]
# Environment: LOAD_DIR (the model's folder), SAVE_DIR (a new folder), TP, PP. Relative paths start at the root of the
# repository.
# Training has to be started with the same numbers. Append --dry-run to see what would be written, without writing it.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

LOAD_DIR="${LOAD_DIR:-./model_from_hf/phi35_mini_hf/}"
SAVE_DIR="${SAVE_DIR:-./model_weights/phi35_mini_mcore/}"
TP="${TP:-2}"
PP="${PP:-2}"

python ./convert_ckpt_v2.py \
    --load-model-type hf \
    --save-model-type mg \
    --model-type-hf phi3.5 \
    --load-dir "$LOAD_DIR" \
    --save-dir "$SAVE_DIR" \
    --target-tensor-parallel-size "$TP" \
    --target-pipeline-parallel-size "$PP" \
    "$@"
