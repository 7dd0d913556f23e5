#!/usr/bin/env bash
# Qwen3-Coder-Next (80B), Hugging Face -> Megatron: 48 layers on 8 stages, 512 experts over 8 ranks.
#   bash examples/mcore/qwen3_coder_next/ckpt_convert_qwen3_coder_next_80b_hf2mcore.sh [more flags ...]
# Environment: LOAD_DIR (the model's folder), SAVE_DIR (a new folder), PP, EP. Relative paths start at the root of the
# repository.
# Its attention layers have no tensor parallel form: TP stays 1.
# The MTP layer is left out; append --mtp-num-layers 1 to convert it as well.
# Training has to be started with the same numbers. Append --dry-run to see what would be written, without writing it.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

LOAD_DIR="${LOAD_DIR:-./model_from_hf/qwen3_coder_next_80b_hf/}"
SAVE_DIR="${SAVE_DIR:-./model_weights/qwen3_coder_next_80b_mcore/}"
PP="${PP:-8}"
EP="${EP:-8}"

python ./convert_ckpt_v2.py \
    --load-model-type hf \
    --save-model-type mg \
    --model-type-hf qwen3-next \
    --load-dir "$LOAD_DIR" \
    --save-dir "$SAVE_DIR" \
    --target-pipeline-parallel-size "$PP" \
    --target-expert-parallel-size "$EP" \
    --moe-grouped-gemm \
    "$@"
