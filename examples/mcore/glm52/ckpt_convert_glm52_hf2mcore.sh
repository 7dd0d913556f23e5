#!/usr/bin/env bash
# GLM-5.2, Hugging Face -> Megatron: 78 layers on 8 stages of uneven length, 256 experts over 64 ranks, none of them
# cut, with the MTP layer, latent attention in four matrices.
#   bash examples/mcore/glm52/ckpt_convert_glm52_hf2mcore.sh [more flags ...]
# Environment: LOAD_DIR (the model's folder), SAVE_DIR (a new folder), TP, PP, EP, ETP, LAYER_LIST (layers of each
# stage), MTP_LAYERS. Relative paths start at the root of the repository.
# Training has to be started with the same numbers. Append --dry-run to see what would be written, without writing it.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

LOAD_DIR="${LOAD_DIR:-./model_from_hf/glm52_hf/}"
SAVE_DIR="${SAVE_DIR:-./model_weights/glm52_mcore/}"
TP="${TP:-2}"
PP="${PP:-8}"
EP="${EP:-64}"
ETP="${ETP:-1}"
LAYER_LIST="${LAYER_LIST:-10,12,8,8,8,12,12,8}"
MTP_LAYERS="${MTP_LAYERS:-1}"

python ./convert_ckpt_v2.py \
    --load-model-type hf \
    --save-model-type mg \
    --model-type-hf glm52 \
    --load-dir "$LOAD_DIR" \
    --save-dir "$SAVE_DIR" \
    --target-tensor-parallel-size "$TP" \
    --target-pipeline-parallel-size "$PP" \
    --target-expert-parallel-size "$EP" \
    --expert-tensor-parallel-size "$ETP" \
    --num-layer-list "$LAYER_LIST" \
    --mtp-num-layers "$MTP_LAYERS" \
    --moe-grouped-gemm \
    --mla-mm-split \
    "$@"
