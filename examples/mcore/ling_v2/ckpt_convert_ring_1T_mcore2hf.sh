#!/usr/bin/env bash
# Ring-1T, Megatron -> Hugging Face.
#   bash examples/mcore/ling_v2/ckpt_convert_ring_1T_mcore2hf.sh [more flags ...]
# Environment: LOAD_DIR (the checkpoint), HF_CFG_DIR (the original model's folder: config.json, tokenizer), SAVE_DIR (a
# new folder). Relative paths start at the root of the repository.
# How the checkpoint is split need not be said: it is read off the checkpoint.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

LOAD_DIR="${LOAD_DIR:-./model_weights/ring_1T_mcore/}"
HF_CFG_DIR="${HF_CFG_DIR:-./model_from_hf/ring_1T_hf/}"
SAVE_DIR="${SAVE_DIR:-./model_from_mg/ring_1T_hf/}"

python ./convert_ckpt_v2.py \
    --load-model-type mg \
    --save-model-type hf \
    --model-type-hf bailing_mini \
    --load-dir "$LOAD_DIR" \
    --save-dir "$SAVE_DIR" \
    --hf-cfg-dir "$HF_CFG_DIR" \
    "$@"
