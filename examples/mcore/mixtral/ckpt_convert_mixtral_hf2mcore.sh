#!/usr/bin/env bash
# Mixtral, Hugging Face -> Megatron: Mixtral 8x7B (32 layers) on 4 pipeline stages, its 8 experts over 2 ranks.
#   bash examples/mcore/mixtral/ckpt_convert_mixtral_hf2mcore.sh [more flags ...]
# Environment: LOAD_DIR (the model's folder), SAVE_DIR (a new folder), TP, PP, EP. Relative paths start at the root of
# the repository.
# Training has to be started with the same numbers. Append --dry-run to see what would be written, without writing it.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

LOAD_DIR="${LOAD_DIR:-./model_from_hf/mixtral_hf/}"
SAVE_DIR="${SAVE_DIR:-./model_weights/mixtral_mcore/}"
TP="${TP:-1}"
PP="${PP:-4}"
EP="${EP:-2}"

python ./convert_ckpt_v2.py \
    --load-model-type hf \
    --save-model-type mg \
    --model-type-hf mixtral \
    --load-dir "$LOAD_DIR" \
    --save-dir "$SAVE_DIR" \
    --target-tensor-parallel-size "$TP" \
    --target-pipeline-parallel-size "$PP" \
    --target-expert-parallel-size "$EP" \
    --moe-grouped-gemm \
    "$@"
