#!/usr/bin/env bash
# DeepSeek-V3, Hugging Face -> Megatron: 61 layers and 3 empty ones, in blocks of 2 on 8 stages, 256 experts over 32
# ranks, with the MTP layer.
#   bash examples/mcore/deepseek3/ckpt_convert_deepseek3_hf2mcore.sh [more flags ...]
# Environment: LOAD_DIR (the model's folder), SAVE_DIR (a new folder), TP, PP, EP, VPP (layers of a block), NOOP_LAYERS
# (positions of empty layers), MTP_LAYERS. Relative paths start at the root of the repository.
# Weights in block-wise fp8, as they are published, are dequantised while they are read.
# Training has to be started with the same numbers. Append --dry-run to see what would be written, without writing it.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

LOAD_DIR="${LOAD_DIR:-./model_from_hf/deepseek3-bf16-hf/}"
SAVE_DIR="${SAVE_DIR:-./model_weights/deepseek3_mcore/}"
TP="${TP:-2}"
PP="${PP:-8}"
EP="${EP:-32}"
VPP="${VPP:-2}"
NOOP_LAYERS="${NOOP_LAYERS:-47,62,63}"
MTP_LAYERS="${MTP_LAYERS:-1}"

python ./convert_ckpt_v2.py \
    --load-model-type hf \
    --save-model-type mg \
    --model-type-hf deepseek3 \
    --load-dir "$LOAD_DIR" \
    --save-dir "$SAVE_DIR" \
    --target-tensor-parallel-size "$TP" \
    --target-pipeline-parallel-size "$PP" \
    --target-expert-parallel-size "$EP" \
    --num-layers-per-virtual-pipeline-stage "$VPP" \
    --noop-layers "$NOOP_LAYERS" \
    --mtp-num-layers "$MTP_LAYERS" \
    --moe-grouped-gemm \
    "$@"
