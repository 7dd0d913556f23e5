#!/usr/bin/env bash
# PLM-1.8B, Hugging Face -> Megatron: on one rank.
#   bash examples/mcore/plm/ckpt_convert_plm_1point8b_hf2mcore.sh [more flags ...]
# Environment: LOAD_DIR (the model's folder), SAVE_DIR (a new folder), TP, PP. Relative paths start at the root of the
# repository.
# Training has to be started with the same numbers. Append --dry-run to see what would be written, without writing it.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

LOAD_DIR="${LOAD_DIR:-./model_from_hf/plm_1point8b_hf/}"
SAVE_DIR="${SAVE_DIR:-./model_weights/plm_1point8b_mcore/}"
TP="${TP:-1}"
PP="${PP:-1}"

python ./convert_ckpt_v2.py \
    --load-model-type hf \
    --save-model-type mg \
    --model-type-hf plm \
    --load-dir "$LOAD_DIR" \
    --save-dir "$SAVE_DIR" \
    --target-tensor-parallel-size "$TP" \
    --target-pipeline-parallel-size "$PP" \
    "$@"
