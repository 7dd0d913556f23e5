#!/usr/bin/env bash
# Qwen3-Coder-480B-A35B, Hugging Face -> Megatron: 62 layers between 2 empty ones, in blocks of 2 on 4 stages, 160
# experts over 32 ranks, none of them cut.
#   bash examples/mcore/qwen3_moe/ckpt_convert_qwen3_moe_480b_hf2mcore.sh [more flags ...]
# Environment: LOAD_DIR (the model's folder), SAVE_DIR (a new folder), TP, PP, EP, ETP, VPP (layers of a block),
# NOOP_LAYERS (positions of empty layers). Relative paths start at the root of the repository.
# Training has to be started with the same numbers. Append --dry-run to see what would be written, without writing it.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

LOAD_DIR="${LOAD_DIR:-./model_from_hf/qwen3_moe_480b_hf/}"
SAVE_DIR="${SAVE_DIR:-./model_weights/qwen3_moe_480b_mcore/}"
TP="${TP:-4}"
PP="${PP:-4}"
EP="${EP:-32}"
ETP="${ETP:-1}"
VPP="${VPP:-2}"
NOOP_LAYERS="${NOOP_LAYERS:-0,63}"

python ./convert_ckpt_v2.py \
    --load-model-type hf \
    --save-model-type mg \
    --model-type-hf qwen3-moe \
    --load-dir "$LOAD_DIR" \
    --save-dir "$SAVE_DIR" \
    --target-tensor-parallel-size "$TP" \
    --target-pipeline-parallel-size "$PP" \
    --target-expert-parallel-size "$EP" \
    --expert-tensor-parallel-size "$ETP" \
    --num-layers-per-virtual-pipeline-stage "$VPP" \
    --noop-layers "$NOOP_LAYERS" \
    --moe-grouped-gemm \
    "$@"
