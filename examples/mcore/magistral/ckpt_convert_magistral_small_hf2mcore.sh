#!/usr/bin/env bash
# Magistral Small (24B), Hugging Face -> Megatron: 40 layers over 4 tensor parallel ranks and 2 pipeline stages.
#   bash examples/mcore/magistral/ckpt_convert_magistral_small_hf2mcore.sh [more flags ...]
# Environment: LOAD_DIR (the model's folder), SAVE_DIR (a new folder), TP, PP. Relative paths start at the root of the
# repository.
# Training has to be started with the same numbers. Append --dry-run to see what would be written, without writing it.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

LOAD_DIR="${LOAD_DIR:-./model_from_hf/magistral_small_hf/}"
SAVE_DIR="${SAVE_DIR:-./model_weights/magistral_small_mcore/}"
TP="${TP:-4}"
PP="${PP:-2}"

python ./convert_ckpt_v2.py \
    --load-model-type hf \
    --save-model-type mg \
    --model-type-hf magistral \
    --load-dir "$LOAD_DIR" \
    --save-dir "$SAVE_DIR" \
    --target-tensor-parallel-size "$TP" \
    --target-pipeline-parallel-size "$PP" \
    "$@"
