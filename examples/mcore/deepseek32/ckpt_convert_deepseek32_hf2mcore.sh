#!/usr/bin/env bash
# DeepSeek-V3.2, Hugging Face -> Megatron: 61 layers and 3 empty ones on 8 stages, 256 experts over 64 ranks, with the
# MTP layer, latent attention in four matrices.
#   bash examples/mcore/deepseek32/ckpt_convert_deepseek32_hf2mcore.sh [more flags ...]
# Environment: LOAD_DIR (the model's folder), SAVE_DIR (a new folder), TP, PP, EP, ETP, NOOP_LAYERS (positions of empty
# layers), MTP_LAYERS. Relative paths start at the root of the repository.
# Weights in block-wise fp8, as they are published, are dequantised while they are read.
# Training has to be started with the same numbers. Append --dry-run to see what would be written, without writing it.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

LOAD_DIR="${LOAD_DIR:-./model_from_hf/deepseek32-bf16-hf/}"
SAVE_DIR="${SAVE_DIR:-./model_weights/deepseek32_mcore/}"
TP="${TP:-1}"
PP="${PP:-8}"
EP="${EP:-64}"
ETP="${ETP:-1}"
NOOP_LAYERS="${NOOP_LAYERS:-61,62,63}"
MTP_LAYERS="${MTP_LAYERS:-1}"

python ./convert_ckpt_v2.py \
    --load-model-type hf \
    --save-model-type mg \
    --model-type-hf deepseek32 \
    --load-dir "$LOAD_DIR" \
    --save-dir "$SAVE_DIR" \
    --target-tensor-parallel-size "$TP" \
    --target-pipeline-parallel-size "$PP" \
    --target-expert-parallel-size "$EP" \
    --expert-tensor-parallel-size "$ETP" \
    --noop-layers "$NOOP_LAYERS" \
    --mtp-num-layers "$MTP_LAYERS" \
    --moe-grouped-gemm \
    --mla-mm-split \
    "$@"
