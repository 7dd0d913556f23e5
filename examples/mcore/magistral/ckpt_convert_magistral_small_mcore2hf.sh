#!/usr/bin/env bash
# Magistral Small (24B), Megatron -> Hugging Face.
#   bash examples/mcore/magistral/ckpt_convert_magistral_small_mcore2hf.sh [more flags ...]
# Environment: LOAD_DIR (the checkpoint), HF_CFG_DIR (the original model's folder: config.json, tokenizer), SAVE_DIR (a
# new folder). Relative paths start at the root of the repository.
# How the checkpoint is split need not be said: it is read off the checkpoint.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

LOAD_DIR="${LOAD_DIR:-./model_weights/magistral_small_mcore/}"
HF_CFG_DIR="${HF_CFG_DIR:-./model_from_hf/magistral_small_hf/}"
SAVE_DIR="${SAVE_DIR:-./model_from_mg/magistral_small_hf/}"

python ./convert_ckpt_v2.py \
    --load-model-type mg \
    --save-model-type hf \
    --model-type-hf magistral \
    --load-dir "$LOAD_DIR" \
    --save-dir "$SAVE_DIR" \
    --hf-cfg-dir "$HF_CFG_DIR" \
    "$@"
