#!/usr/bin/env bash
# Records of instructions -> token ids with a loss mask for fine-tuning Qwen3-MoE, several samples in one sequence:
#   bash examples/mcore/qwen3_moe/data_convert_qwen3_moe_instruction_pack.sh [flags of preprocess_data.py ...]
# Environment: INPUT (file or folder with instruction, input, output), TOKENIZER_PATH, OUTPUT_PREFIX, WORKERS,
# SEQ_LENGTH. Relative paths start at the root of the repository. Add --check to see the plan without writing anything.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

INPUT="${INPUT:-./dataset/alpaca.parquet}"
TOKENIZER_PATH="${TOKENIZER_PATH:-./model_from_hf/qwen3_moe_hf/}"
OUTPUT_PREFIX="${OUTPUT_PREFIX:-./finetune_dataset/alpaca_pack}"
WORKERS="${WORKERS:-4}"
SEQ_LENGTH="${SEQ_LENGTH:-4096}"

# Writes ${OUTPUT_PREFIX}_packed_{input_ids,attention_mask,labels}_document.bin/.idx and ${OUTPUT_PREFIX}_summary.json;
# training takes --data-path "${OUTPUT_PREFIX}" --pack --neat-pack --reset-attention-mask with the same --seq-length.
python ./preprocess_data.py \
    --input "$INPUT" \
    --tokenizer-name-or-path "$TOKENIZER_PATH" \
    --tokenizer-type PretrainedFromHF \
    --handler-name AlpacaStyleInstructionHandler \
    --prompt-type qwen3 \
    --enable-thinking true \
    --pack --neat-pack --seq-length "$SEQ_LENGTH" \
    --output-prefix "$OUTPUT_PREFIX" \
    --workers "$WORKERS" \
    --log-interval 1000 \
    "$@"
