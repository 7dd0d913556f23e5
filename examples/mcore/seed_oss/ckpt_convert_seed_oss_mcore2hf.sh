#!/usr/bin/env bash
# Seed-OSS-36B, Megatron -> Hugging Face.
#   bash examples/mcore/seed_oss/ckpt_convert_seed_oss_mcore2hf.sh [more flags ...]
# Environment: LOAD_DIR (the checkpoint), HF_CFG_DIR (the original model's folder: config.json, tokenizer), SAVE_DIR (a
# new folder). Relative paths start at the root of the repository.
# How the checkpoint is split need not be said: it is read off the checkpoint.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

LOAD_DIR="${LOAD_DIR:-./model_weights/seed_oss_mcore/}"
HF_CFG_DIR="${HF_CFG_DIR:-./model_from_hf/seed_oss_hf/}"
SAVE_DIR="${SAVE_DIR:-./model_from_mg/seed_oss_hf/}"

python ./convert_ckpt_v2.py \
    --load-model-type mg \
    --save-model-type hf \
    --model-type-hf seed-oss \
    --load-dir "$LOAD_DIR" \
    --save-dir "$SAVE_DIR" \
    --hf-cfg-dir "$HF_CFG_DIR" \
    "$@"
