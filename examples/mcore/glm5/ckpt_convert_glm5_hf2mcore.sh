#!/usr/bin/env bash
# GLM-5, Hugging Face -> Megatron: 78 layers and 2 empty ones, in blocks of 2 on 8 stages, 256 experts over 64 ranks,
# none of them cut, with the MTP layer, latent attention in four matrices.
#   bash examples/mcore/glm5/ckpt_convert_glm5_hf2mcore.sh [more flags ...]
# Environment: LOAD_DIR (the model's folder), SAVE_DIR (a new folder), TP, PP, EP, ETP, VPP (layers of a block),
# NOOP_LAYERS (positions of empty layers), MTP_LAYERS. Relative paths start at the root of the repository.
# Training has to be started with the same numbers. Append --dry-run to see what would be written, without writing it.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

LOAD_DIR="${LOAD_DIR:-./model_from_hf/glm5_hf/}"
SAVE_DIR="${SAVE_DIR:-./model_weights/glm5_mcore/}"
TP="${TP:-2}"
PP="${PP:-8}"
EP="${EP:-64}"
ETP="${ETP:-1}"
VPP="${VPP:-2}"
NOOP_LAYERS="${NOOP_LAYERS:-78,79}"
MTP_LAYERS="${MTP_LAYERS:-1}"

python ./convert_ckpt_v2.py \
    --load-model-type hf \
    --save-model-type mg \
    --model-type-hf glm5 \
    --load-dir "$LOAD_DIR" \
    --save-dir "$SAVE_DIR" \
    --target-tensor-parallel-size "$TP" \
    --target-pipeline-parallel-size "$PP" \
    --target-expert-parallel-size "$EP" \
    --expert-tensor-parallel-size "$ETP" \
    --num-layers-per-virtual-pipeline-stage "$VPP" \
    --noop-layers "$NOOP_LAYERS" \
    --mtp-num-layers "$MTP_LAYERS" \
    --moe-grouped-gemm \
    --mla-mm-split \
    "$@"
