#!/usr/bin/env bash
# Qwen3-235B-A22B, Megatron -> Hugging Face.
#   bash examples/mcore/qwen3_moe/ckpt_convert_qwen3_moe_235b_mcore2hf.sh [more flags ...]
# Environment: LOAD_DIR (the checkpoint), HF_CFG_DIR (the original model's folder: config.json, tokenizer), SAVE_DIR (a
# new folder). Relative paths start at the root of the repository.
# How the checkpoint is split need not be said: it is read off the checkpoint.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

LOAD_DIR="${LOAD_DIR:-./model_weights/qwen3_moe_235b_mcore/}"
HF_CFG_DIR="${HF_CFG_DIR:-./model_from_hf/qwen3_moe_235b_hf/}"
SAVE_DIR="${SAVE_DIR:-./model_from_mg/qwen3_moe_235b_hf/}"

python ./convert_ckpt_v2.py \
    --load-model-type mg \
    --save-model-type hf \
    --model-type-hf qwen3-moe \
    --load-dir "$LOAD_DIR" \
    --save-dir "$SAVE_DIR" \
    --hf-cfg-dir "$HF_CFG_DIR" \
    "$@"
