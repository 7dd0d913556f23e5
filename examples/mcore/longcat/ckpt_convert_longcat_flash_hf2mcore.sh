#!/usr/bin/env bash
# LongCat-Flash, Hugging Face -> Megatron: 28 layers on 4 stages, 512 experts over 32 ranks, none of them cut.
#   bash examples/mcore/longcat/ckpt_convert_longcat_flash_hf2mcore.sh [more flags ...]
# Environment: LOAD_DIR (the model's folder), SAVE_DIR (a new folder), TP, PP, EP, ETP. Relative paths start at the root
# of the repository.
# Training has to be started with the same numbers. Append --dry-run to see what would be written, without writing it.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

LOAD_DIR="${LOAD_DIR:-./model_from_hf/longcat_flash_hf/}"
SAVE_DIR="${SAVE_DIR:-./model_weights/longcat_flash_mcore/}"
TP="${TP:-16}"
PP="${PP:-4}"
EP="${EP:-32}"
ETP="${ETP:-1}"

python ./convert_ckpt_v2.py \
    --load-model-type hf \
    --save-model-type mg \
    --model-type-hf longcat \
    --load-dir "$LOAD_DIR" \
    --save-dir "$SAVE_DIR" \
    --target-tensor-parallel-size "$TP" \
    --target-pipeline-parallel-size "$PP" \
    --target-expert-parallel-size "$EP" \
    --expert-tensor-parallel-size "$ETP" \
    --moe-grouped-gemm \
    "$@"
