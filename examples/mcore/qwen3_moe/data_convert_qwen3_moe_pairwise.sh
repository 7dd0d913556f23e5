#!/usr/bin/env bash
# Preference pairs -> token ids with loss masks of both replies, for dpo_qwen3_30b_a3b_4K_ptd.sh:
#   bash examples/mcore/qwen3_moe/data_convert_qwen3_moe_pairwise.sh [flags of preprocess_data.py ...]
# Environment: INPUT (file or folder with system, question, chosen, rejected), TOKENIZER_PATH, OUTPUT_PREFIX, WORKERS.
# Relative paths start at the root of the repository. Add --check to see the plan without writing anything.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

INPUT="${INPUT:-./dataset/orca_rlhf.jsonl}"
TOKENIZER_PATH="${TOKENIZER_PATH:-./model_from_hf/qwen3_moe_hf/}"
OUTPUT_PREFIX="${OUTPUT_PREFIX:-./finetune_dataset/orca_rlhf}"
WORKERS="${WORKERS:-4}"

# --map-keys names the columns of INPUT. Writes ${OUTPUT_PREFIX}_packed_{chosen,rejected}_{input_ids,labels}_document
# .bin/.idx and ${OUTPUT_PREFIX}_summary.json; training takes --data-path "${OUTPUT_PREFIX}".
python ./preprocess_data.py \
    --input "$INPUT" \
    --tokenizer-name-or-path "$TOKENIZER_PATH" \
    --tokenizer-type PretrainedFromHF \
    --handler-name AlpacaStylePairwiseHandler \
    --prompt-type qwen3 \
    --map-keys '{"prompt": "question", "query": "", "system": "system"}' \
    --output-prefix "$OUTPUT_PREFIX" \
    --workers "$WORKERS" \
    --log-interval 1000 \
    "$@"
