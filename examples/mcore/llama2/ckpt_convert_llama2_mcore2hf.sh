#!/usr/bin/env bash
# Llama 2, Megatron -> Hugging Face.
#   bash examples/mcore/llama2/ckpt_convert_llama2_mcore2hf.sh [more flags ...]
# Environment: LOAD_DIR (the checkpoint), HF_CFG_DIR (the original model's folder: config.json, tokenizer), SAVE_DIR (a
# new folder). Relative paths start at the root of the repository.
# How the checkpoint is split need not be said: it is read off the checkpoint.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

LOAD_DIR="${LOAD_DIR:-./model_weights/llama2_mcore/}"
HF_CFG_DIR="${HF_CFG_DIR:-./model_from_hf/llama2_hf/}"
SAVE_DIR="${SAVE_DIR:-./model_from_mg/llama2_hf/}"

python ./convert_ckpt_v2.py \
    --load-model-type mg \
    --save-model-type hf \
    --model-type-hf llama2 \
    --load-dir "$LOAD_DIR" \
    --save-dir "$SAVE_DIR" \
    --hf-cfg-dir "$HF_CFG_DIR" \
    "$@"
