#!/usr/bin/env bash
# Ring-1T, Hugging Face -> Megatron: 80 layers on 16 stages, 256 experts over 32 ranks, none of them cut.
#   bash examples/mcore/ling_v2/ckpt_convert_ring_1T_hf2mcore.sh [more flags ...]
# Environment: LOAD_DIR (the model's folder), SAVE_DIR (a new folder), TP, PP, EP, ETP. Relative paths start at the root
# of the repository.
# Training has to be started with the same numbers. Append --dry-run to see what would be written, without writing it.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

LOAD_DIR="${LOAD_DIR:-./model_from_hf/ring_1T_hf/}"
SAVE_DIR="${SAVE_DIR:-./model_weights/ring_1T_mcore/}"
TP="${TP:-4}"
PP="${PP:-16}"
EP="${EP:-32}"
ETP="${ETP:-1}"

python ./convert_ckpt_v2.py \
    --load-model-type hf \
    --save-model-type mg \
    --model-type-hf bailing_mini \
    --load-dir "$LOAD_DIR" \
    --save-dir "$SAVE_DIR" \
    --target-tensor-parallel-size "$TP" \
    --target-pipeline-parallel-size "$PP" \
    --target-expert-parallel-size "$EP" \
    --expert-tensor-parallel-size "$ETP" \
    --moe-grouped-gemm \
    "$@"
