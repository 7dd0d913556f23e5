#!/usr/bin/env bash
# GLM-4.5, Hugging Face -> Megatron: 92 layers on 4 stages, 160 experts over 8 ranks.
#   bash examples/mcore/glm45/ckpt_convert_glm45_hf2mcore.sh [more flags ...]
# Environment: LOAD_DIR (the model's folder), SAVE_DIR (a new folder), TP, PP, EP. Relative paths start at the root of
# the repository.
# The MTP layer is left out; append --mtp-num-layers 1 to convert it as well.
# Training has to be started with the same numbers. Append --dry-run to see what would be written, without writing it.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

LOAD_DIR="${LOAD_DIR:-./model_from_hf/glm45_hf/}"
SAVE_DIR="${SAVE_DIR:-./model_weights/glm45_mcore/}"
TP="${TP:-4}"
PP="${PP:-4}"
EP="${EP:-8}"

python ./convert_ckpt_v2.py \
    --load-model-type hf \
    --save-model-type mg \
    --model-type-hf glm45 \
    --load-dir "$LOAD_DIR" \
    --save-dir "$SAVE_DIR" \
    --target-tensor-parallel-size "$TP" \
    --target-pipeline-parallel-size "$PP" \
    --target-expert-parallel-size "$EP" \
    --moe-grouped-gemm \
    "$@"
