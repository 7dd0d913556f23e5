#!/usr/bin/env bash
# Fine-tune Llama-2-7B with LU-LoRA on 8 devices (TP 2); Ascend NPU or CUDA. The adapters of the first half of the layers
# learn by Oja's rule while tokens pass through them; backpropagation trains the others, and ends there.
#   bash examples/mcore/llama2/tune_llama2_7b_lu_lora_ptd.sh [more flags of posttrain_gpt.py ...]
# Environment: NPUS_PER_NODE, NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT, DATA_PATH, TOKENIZER_PATH, CKPT_LOAD_DIR,
# CKPT_SAVE_DIR, LORA_LOAD_DIR, TP, PP, MBS, GBS, SEQ_LENGTH, TRAIN_ITERS, FINAL_LOCAL_LAYER. Of a flag given twice the
# last one counts: append what shall differ, --check too. Relative paths start at the root of the repository.
# The same in short, with all sizes of the model from its config.json:
#   torchrun --nproc_per_node 8 posttrain_gpt.py --stage sft --model-from-hf ./model_from_hf/llama2_hf/ \
#       --load ./model_from_hf/llama2_hf/ --lora-r 16 --lora-alpha 32 --lora-ckpt-filter \
#       --lora-target-modules linear_qkv linear_proj linear_fc1 linear_fc2 \
#       --lu-lora-final-layer-index 15 --lu-lora-lr 1.25e-6 --lu-lora-lr-ratio 24 \
#       --data-path ./finetune_dataset/alpaca --split 100,0,0 \
#       --prompt-type llama2 --no-pad-to-seq-lengths --tensor-model-parallel-size 2 --sequence-parallel --bf16 \
#       --seq-length 4096 --micro-batch-size 1 --global-batch-size 64 --train-iters 2000 --lr 1.25e-6 --min-lr 1.25e-7 \
#       --lr-decay-style cosine --lr-warmup-fraction 0.01 --weight-decay 0.1 --adam-beta2 0.95 --attention-dropout 0 \
#       --hidden-dropout 0 --use-flash-attn --use-fused-rmsnorm --use-fused-swiglu --use-fused-rotary-pos-emb \
#       --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --reuse-fp32-param --eval-iters 0 \
#       --log-interval 1 --save ./ckpt/llama2_7b_lu_lora/ --ckpt-format torch
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
source examples/mcore/env_config.sh

NPUS_PER_NODE="${NPUS_PER_NODE:-8}"
NNODES="${NNODES:-1}"
NODE_RANK="${NODE_RANK:-0}"
MASTER_ADDR="${MASTER_ADDR:-localhost}"
MASTER_PORT="${MASTER_PORT:-6000}"

# Samples: the prefix that data_convert_llama2_instruction.sh writes. Or a file of records, which is preprocessed once:
# append --handler-name AlpacaStyleInstructionHandler.
DATA_PATH="${DATA_PATH:-./finetune_dataset/alpaca}"
TOKENIZER_PATH="${TOKENIZER_PATH:-./model_from_hf/llama2_hf/}"
# Where the model's weights come from, which stay as they are: a Hugging Face directory, or a folder of checkpoints.
# To go on with a run, LORA_LOAD_DIR is its CKPT_SAVE_DIR.
CKPT_LOAD_DIR="${CKPT_LOAD_DIR:-./model_from_hf/llama2_hf/}"
CKPT_SAVE_DIR="${CKPT_SAVE_DIR:-./ckpt/llama2_7b_lu_lora/}"
LORA_LOAD_DIR="${LORA_LOAD_DIR:-}"

TP="${TP:-2}"
PP="${PP:-1}"
MBS="${MBS:-1}"
GBS="${GBS:-64}"
SEQ_LENGTH="${SEQ_LENGTH:-4096}"
TRAIN_ITERS="${TRAIN_ITERS:-2000}"
# The last layer without backpropagation, from 0 on.
FINAL_LOCAL_LAYER="${FINAL_LOCAL_LAYER:-15}"

DISTRIBUTED_ARGS=(
    --nproc_per_node "$NPUS_PER_NODE" --nnodes "$NNODES" --node_rank "$NODE_RANK"
    --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT"
)

MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size "$TP"
    --pipeline-model-parallel-size "$PP"
    --sequence-parallel
)

GPT_ARGS=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008
    --num-attention-heads 32 --kv-channels 128
    --padded-vocab-size 32000 --max-position-embeddings 4096
    --position-embedding-type rope --rotary-base 10000
    --normalization RMSNorm --norm-epsilon 1e-5
    --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-softmax-in-fp32 --attention-dropout 0.0 --hidden-dropout 0.0
    --init-method-std 0.01
)

OPTIMIZE_ARGS=(
    --use-flash-attn --use-fused-rotary-pos-emb --use-fused-swiglu --use-fused-rmsnorm
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --reuse-fp32-param
)

TRAIN_ARGS=(
    --micro-batch-size "$MBS" --global-batch-size "$GBS" --seq-length "$SEQ_LENGTH"
    --train-iters "$TRAIN_ITERS" --seed 42 --bf16
    --lr 1.25e-6 --min-lr 1.25e-7 --lr-decay-style cosine --lr-warmup-fraction 0.01
    --weight-decay 1e-1 --clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.95
)

TUNE_ARGS=(
    --stage sft --is-instruction-dataset --prompt-type llama2 --no-pad-to-seq-lengths
    --lora-r 16 --lora-alpha 32 --lora-target-modules linear_qkv linear_proj linear_fc1 linear_fc2
    --lu-lora-final-layer-index "$FINAL_LOCAL_LAYER" --lu-lora-lr 1.25e-6 --lu-lora-lr-ratio 24
    --lora-ckpt-filter
)

DATA_ARGS=(
    --data-path "$DATA_PATH" --split "100,0,0"
    --tokenizer-type PretrainedFromHF --tokenizer-name-or-path "$TOKENIZER_PATH"
)

OUTPUT_ARGS=(
    --save "$CKPT_SAVE_DIR" --save-interval 2000 --ckpt-format torch
    --log-interval 1 --eval-iters 0 --load "$CKPT_LOAD_DIR"
)

if [[ -n "$LORA_LOAD_DIR" ]]; then
    OUTPUT_ARGS+=(--lora-load "$LORA_LOAD_DIR")
fi

mkdir -p logs
# pipefail: the exit code is torchrun's, not tee's.
torchrun "${DISTRIBUTED_ARGS[@]}" posttrain_gpt.py \
    "${MODEL_PARALLEL_ARGS[@]}" \
    "${GPT_ARGS[@]}" \
    "${OPTIMIZE_ARGS[@]}" \
    "${TRAIN_ARGS[@]}" \
    "${TUNE_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    "${OUTPUT_ARGS[@]}" \
    "$@" 2>&1 | tee "logs/tune_llama2_7b_lu_lora_ptd_$(date +%Y%m%d_%H%M%S).log"
