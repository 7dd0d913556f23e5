#!/usr/bin/env bash
# Records of instructions -> token ids with a loss mask for fine-tuning Llama 2, in files that both backends read:
#   bash examples/mcore/llama2/data_convert_llama2_instruction.sh [flags of preprocess_data.py ...]
# Environment: INPUT (file or folder with instruction, input, output), TOKENIZER_PATH, OUTPUT_PREFIX, WORKERS.
# Relative paths start at the root of the repository. Add --check to see the plan without writing anything, and
# --pack --neat-pack --seq-length 4096 to put several samples in one sequence.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

INPUT="${INPUT:-./dataset/alpaca.parquet}"
TOKENIZER_PATH="${TOKENIZER_PATH:-./model_from_hf/llama2_hf/}"
OUTPUT_PREFIX="${OUTPUT_PREFIX:-./finetune_dataset/alpaca}"
WORKERS="${WORKERS:-4}"

# Writes ${OUTPUT_PREFIX}_packed_{input_ids,attention_mask,labels}_document.bin/.idx and ${OUTPUT_PREFIX}_summary.json;
# training takes --data-path "${OUTPUT_PREFIX}". To see what is trained on:
#   python preprocess_data.py --inspect "${OUTPUT_PREFIX}"
python ./preprocess_data.py \
    --input "$INPUT" \
    --tokenizer-name-or-path "$TOKENIZER_PATH" \
    --tokenizer-type PretrainedFromHF \
    --handler-name AlpacaStyleInstructionHandler \
    --prompt-type llama2 \
    --output-prefix "$OUTPUT_PREFIX" \
    --workers "$WORKERS" \
    --log-interval 1000 \
    "$@"
