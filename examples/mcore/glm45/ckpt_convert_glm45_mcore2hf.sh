#!/usr/bin/env bash
# GLM-4.5, Megatron -> Hugging Face.
#   bash examples/mcore/glm45/ckpt_convert_glm45_mcore2hf.sh [more flags ...]
# Environment: LOAD_DIR (the checkpoint), HF_CFG_DIR (the original model's folder: config.json, tokenizer), SAVE_DIR (a
# new folder). Relative paths start at the root of the repository.
# How the checkpoint is split need not be said: it is read off the checkpoint.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

LOAD_DIR="${LOAD_DIR:-./model_weights/glm45_mcore/}"
HF_CFG_DIR="${HF_CFG_DIR:-./model_from_hf/glm45_hf/}"
SAVE_DIR="${SAVE_DIR:-./model_from_mg/glm45_hf/}"

python ./convert_ckpt_v2.py \
    --load-model-type mg \
    --save-model-type hf \
    --model-type-hf glm45 \
    --load-dir "$LOAD_DIR" \
    --save-dir "$SAVE_DIR" \
    --hf-cfg-dir "$HF_CFG_DIR" \
    "$@"
