#!/usr/bin/env bash
# Qwen2.5, Hugging Face -> Megatron: Qwen2.5-7B (28 layers) on 4 pipeline stages.
#   bash examples/mcore/qwen25/ckpt_convert_qwen25_hf2mcore.sh [more flags ...]
# Environment: LOAD_DIR (the model's folder), SAVE_DIR (a new folder), TP, PP. Relative paths start at the root of the
# repository.
# Training has to be started with the same numbers. Append --dry-run to see what would be written, without writing it.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

LOAD_DIR="${LOAD_DIR:-./model_from_hf/qwen25_hf/}"
SAVE_DIR="${SAVE_DIR:-./model_weights/qwen25_mcore/}"
TP="${TP:-1}"
PP="${PP:-4}"

python ./convert_ckpt_v2.py \
    --load-model-type hf \
    --save-model-type mg \
    --model-type-hf qwen25 \
    --load-dir "$LOAD_DIR" \
    --save-dir "$SAVE_DIR" \
    --target-tensor-parallel-size "$TP" \
    --target-pipeline-parallel-size "$PP" \
    "$@"
