#!/usr/bin/env bash
# Llama 2: an adapter trained with LoRA, alone, in the format of PEFT.
#   bash examples/mcore/llama2/ckpt_convert_llama2_lora2hf.sh [more flags ...]
# Environment: LOAD_DIR (the base checkpoint), LORA_LOAD (the checkpoint with the adapter), HF_CFG_DIR (the original
# model's folder), SAVE_DIR (a new folder), LORA_R, LORA_ALPHA. Relative paths start at the root of the repository.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

LOAD_DIR="${LOAD_DIR:-./model_weights/llama2_mcore/}"
LORA_LOAD="${LORA_LOAD:-./ckpt/llama2_lora/}"
HF_CFG_DIR="${HF_CFG_DIR:-./model_from_hf/llama2_hf/}"
SAVE_DIR="${SAVE_DIR:-./model_from_mg/llama2_hf_adapter/}"
LORA_R="${LORA_R:-16}"
LORA_ALPHA="${LORA_ALPHA:-32}"

python ./convert_ckpt_v2.py \
    --load-model-type mg \
    --save-model-type hf \
    --model-type-hf llama2 \
    --load-dir "$LOAD_DIR" \
    --lora-load "$LORA_LOAD" \
    --save-dir "$SAVE_DIR" \
    --hf-cfg-dir "$HF_CFG_DIR" \
    --lora-r "$LORA_R" \
    --lora-alpha "$LORA_ALPHA" \
    --lora-target-modules linear_qkv linear_proj linear_fc1 linear_fc2 \
    --save-lora-to-hf \
    "$@"
