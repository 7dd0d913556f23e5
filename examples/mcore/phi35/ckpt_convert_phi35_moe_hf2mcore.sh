#!/usr/bin/env bash
# Phi-3.5-MoE, Hugging Face -> Megatron: 32 layers on 4 stages, 16 experts over 4 ranks.
#   bash examples/mcore/phi35/ckpt_convert_phi35_moe_hf2mcore.sh [more flags ...]
# Environment: LOAD_DIR (the model's folder), SAVE_DIR (a new folder), TP, PP, EP. Relative paths start at the root of
# the repository.
# Training has to be started with the same numbers. Append --dry-run to see what would be written, without writing it.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

LOAD_DIR="${LOAD_DIR:-./model_from_hf/phi35_moe_hf/}"
SAVE_DIR="${SAVE_DIR:-./model_weights/phi35_moe_mcore/}"
TP="${TP:-1}"
PP="${PP:-4}"
EP="${EP:-4}"

python ./convert_ckpt_v2.py \
    --load-model-type hf \
    --save-model-type mg \
    --model-type-hf phi3.5-moe \
    --load-dir "$LOAD_DIR" \
    --save-dir "$SAVE_DIR" \
    --target-tensor-parallel-size "$TP" \
    --target-pipeline-parallel-size "$PP" \
    --target-expert-parallel-size "$EP" \
    --moe-grouped-gemm \
    "$@"
