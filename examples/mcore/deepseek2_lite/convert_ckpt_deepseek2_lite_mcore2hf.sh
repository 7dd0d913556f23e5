#!/usr/bin/env bash
# DeepSeek-V2-Lite, Megatron -> Hugging Face.
#   bash examples/mcore/deepseek2_lite/convert_ckpt_deepseek2_lite_mcore2hf.sh [more flags ...]
# Environment: LOAD_DIR (the checkpoint), HF_CFG_DIR (the original model's folder: config.json, tokenizer), SAVE_DIR (a
# new folder). Relative paths start at the root of the repository.
# How the checkpoint is split need not be said: it is read off the checkpoint.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

LOAD_DIR="${LOAD_DIR:-./model_weights/deepseek2_lite_mcore/}"
HF_CFG_DIR="${HF_CFG_DIR:-./model_from_hf/deepseek2_lite_hf/}"
SAVE_DIR="${SAVE_DIR:-./model_from_mg/deepseek2_lite_hf/}"

python ./convert_ckpt_v2.py \
    --load-model-type mg \
    --save-model-type hf \
    --model-type-hf deepseek2-lite \
    --load-dir "$LOAD_DIR" \
    --save-dir "$SAVE_DIR" \
    --hf-cfg-dir "$HF_CFG_DIR" \
    "$@"
