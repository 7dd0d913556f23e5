#!/usr/bin/env bash
# Text -> token ids for pre-training Qwen3-MoE, in one pair of files that both backends read:
#   bash examples/mcore/qwen3_moe/data_convert_qwen3_moe_pretrain.sh [flags of preprocess_data.py ...]
# Environment: INPUT (file or folder with a column `text`), TOKENIZER_PATH, OUTPUT_PREFIX, WORKERS.
# Relative paths start at the root of the repository. Add --check to see the plan without writing anything.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

INPUT="${INPUT:-./dataset/train-00000-of-00042.parquet}"
TOKENIZER_PATH="${TOKENIZER_PATH:-./model_from_hf/qwen3_moe_hf/}"
OUTPUT_PREFIX="${OUTPUT_PREFIX:-./dataset/enwiki}"
WORKERS="${WORKERS:-4}"

# Writes ${OUTPUT_PREFIX}_text_document.bin/.idx and ${OUTPUT_PREFIX}_summary.json; training takes
# --data-path "${OUTPUT_PREFIX}_text_document".
python ./preprocess_data.py \
    --input "$INPUT" \
    --tokenizer-name-or-path "$TOKENIZER_PATH" \
    --tokenizer-type PretrainedFromHF \
    --handler-name GeneralPretrainHandler \
    --output-prefix "$OUTPUT_PREFIX" \
    --json-keys text \
    --workers "$WORKERS" \
    --log-interval 1000 \
    "$@"
