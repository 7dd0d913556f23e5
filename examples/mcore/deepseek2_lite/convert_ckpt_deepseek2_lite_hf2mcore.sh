#!/usr/bin/env bash
# DeepSeek-V2-Lite, Hugging Face -> Megatron: 64 experts over 8 ranks.
#   bash examples/mcore/deepseek2_lite/convert_ckpt_deepseek2_lite_hf2mcore.sh [more flags ...]
# Environment: LOAD_DIR (the model's folder), SAVE_DIR (a new folder), TP, PP, EP. Relative paths start at the root of
# the repository.
# Training has to be started with the same numbers. Append --dry-run to see what would be written, without writing it.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

LOAD_DIR="${LOAD_DIR:-./model_from_hf/deepseek2_lite_hf/}"
SAVE_DIR="${SAVE_DIR:-./model_weights/deepseek2_lite_mcore/}"
TP="${TP:-1}"
PP="${PP:-1}"
EP="${EP:-8}"

python ./convert_ckpt_v2.py \
    --load-model-type hf \
    --save-model-type mg \
    --model-type-hf deepseek2-lite \
    --load-dir "$LOAD_DIR" \
    --save-dir "$SAVE_DIR" \
    --target-tensor-parallel-size "$TP" \
    --target-pipeline-parallel-size "$PP" \
    --target-expert-parallel-size "$EP" \
    --moe-grouped-gemm \
    "$@"
