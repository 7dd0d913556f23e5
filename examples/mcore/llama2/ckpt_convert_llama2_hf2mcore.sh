#!/usr/bin/env bash
# Llama 2, Hugging Face -> Megatron: Llama-2-7B (32 layers) over 2 tensor parallel ranks and 4 pipeline stages.
#   bash examples/mcore/llama2/ckpt_convert_llama2_hf2mcore.sh [more flags ...]
# Environment: LOAD_DIR (the model's folder), SAVE_DIR (a new folder), TP, PP. Relative paths start at the root of the
# repository.
# Llama 3 has the same layout: the same flags serve for it.
# Training has to be started with the same numbers. Append --dry-run to see what would be written, without writing it.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

LOAD_DIR="${LOAD_DIR:-./model_from_hf/llama2_hf/}"
SAVE_DIR="${SAVE_DIR:-./model_weights/llama2_mcore/}"
TP="${TP:-2}"
PP="${PP:-4}"

python ./convert_ckpt_v2.py \
    --load-model-type hf \
    --save-model-type mg \
    --model-type-hf llama2 \
    --load-dir "$LOAD_DIR" \
    --save-dir "$SAVE_DIR" \
    --target-tensor-parallel-size "$TP" \
    --target-pipeline-parallel-size "$PP" \
    "$@"
