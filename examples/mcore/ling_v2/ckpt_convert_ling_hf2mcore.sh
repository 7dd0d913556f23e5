#!/usr/bin/env bash
# Ling 2.0, Hugging Face -> Megatron: Ling-mini-2.0 (20 layers) on 4 stages, 256 experts over 8 ranks.
#   bash examples/mcore/ling_v2/ckpt_convert_ling_hf2mcore.sh [more flags ...]
# Environment: LOAD_DIR (the model's folder), SAVE_DIR (a new folder), TP, PP, EP. Relative paths start at the root of
# the repository.
# Training has to be started with the same numbers. Append --dry-run to see what would be written, without writing it.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

LOAD_DIR="${LOAD_DIR:-./model_from_hf/ling_mini_hf/}"
SAVE_DIR="${SAVE_DIR:-./model_weights/ling_mini_mcore/}"
TP="${TP:-1}"
PP="${PP:-4}"
EP="${EP:-8}"

python ./convert_ckpt_v2.py \
    --load-model-type hf \
    --save-model-type mg \
    --model-type-hf bailing_mini \
    --load-dir "$LOAD_DIR" \
    --save-dir "$SAVE_DIR" \
    --target-tensor-parallel-size "$TP" \
    --target-pipeline-parallel-size "$PP" \
    --target-expert-parallel-size "$EP" \
    --moe-grouped-gemm \
    "$@"
