#!/usr/bin/env bash
# Fine-tune Qwen3-0.6B with LoRA on 8 devices (TP 1, PP 1); Ascend NPU or CUDA.
#   bash examples/mcore/qwen3/tune_qwen3_0point6b_4K_lora_ptd.sh [more flags of posttrain_gpt.py ...]
# Environment: NPUS_PER_NODE, NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT, DATA_PATH, TOKENIZER_PATH, CKPT_LOAD_DIR,
# CKPT_SAVE_DIR, LORA_LOAD_DIR, TP, PP, MBS, GBS, SEQ_LENGTH, TRAIN_ITERS. Of a flag given twice the last one counts:
# append what shall differ, --check too. Relative paths start at the root of the repository.
# The same in short, with all sizes of the model from its config.json:
#   torchrun --nproc_per_node 8 posttrain_gpt.py --stage sft --model-from-hf ./model_from_hf/qwen3_0point6b_hf/ \
#       --load ./model_from_hf/qwen3_0point6b_hf/ --lora-r 8 --lora-alpha 16 --lora-ckpt-filter \
#       --lora-target-modules linear_qkv linear_proj linear_fc1 linear_fc2 --data-path ./finetune_dataset/alpaca \
#       --split 100,0,0 --prompt-type qwen3 --no-pad-to-seq-lengths --bf16 --seq-length 4096 --micro-batch-size 1 \
#       --global-batch-size 64 --train-iters 2000 --lr 1.25e-6 --min-lr 1.25e-7 --lr-decay-style cosine \
#       --lr-warmup-fraction 0.01 --weight-decay 0.1 --adam-beta2 0.95 --attention-dropout 0 --hidden-dropout 0 \
#       --use-flash-attn --use-fused-rmsnorm --use-fused-swiglu --use-fused-rotary-pos-emb --use-distributed-optimizer \
#       --overlap-grad-reduce --overlap-param-gather --eval-iters 0 --log-interval 1 \
#       --save ./ckpt/qwen3_0point6b_lora/ --ckpt-format torch
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
source examples/mcore/env_config.sh

NPUS_PER_NODE="${NPUS_PER_NODE:-8}"
NNODES="${NNODES:-1}"
NODE_RANK="${NODE_RANK:-0}"
MASTER_ADDR="${MASTER_ADDR:-localhost}"
MASTER_PORT="${MASTER_PORT:-6000}"

# Samples: the prefix that data_convert_qwen3_instruction.sh writes. Or a file of records, which is preprocessed once:
# append --handler-name AlpacaStyleInstructionHandler (--enable-thinking true trains on thoughts, too).
DATA_PATH="${DATA_PATH:-./finetune_dataset/alpaca}"
TOKENIZER_PATH="${TOKENIZER_PATH:-./model_from_hf/qwen3_0point6b_hf/}"
# Where the model's weights come from, which stay as they are: a Hugging Face directory, or a folder of checkpoints.
# To go on with a run, LORA_LOAD_DIR is its CKPT_SAVE_DIR.
CKPT_LOAD_DIR="${CKPT_LOAD_DIR:-./model_from_hf/qwen3_0point6b_hf/}"
CKPT_SAVE_DIR="${CKPT_SAVE_DIR:-./ckpt/qwen3_0point6b_lora/}"
LORA_LOAD_DIR="${LORA_LOAD_DIR:-}"

TP="${TP:-1}"
PP="${PP:-1}"
MBS="${MBS:-1}"
GBS="${GBS:-64}"
SEQ_LENGTH="${SEQ_LENGTH:-4096}"
TRAIN_ITERS="${TRAIN_ITERS:-2000}"

DISTRIBUTED_ARGS=(
    --nproc_per_node "$NPUS_PER_NODE" --nnodes "$NNODES" --node_rank "$NODE_RANK"
    --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT"
)

MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size "$TP"
    --pipeline-model-parallel-size "$PP"
)

GPT_ARGS=(
    --spec mindspeed_llm.tasks.models.spec.qwen3_spec layer_spec
    --num-layers 28 --hidden-size 1024 --ffn-hidden-size 3072
    --num-attention-heads 16 --group-query-attention --num-query-groups 8 --kv-channels 128
    --padded-vocab-size 151936 --max-position-embeddings 40960
    --position-embedding-type rope --rotary-base 1000000
    --normalization RMSNorm --norm-epsilon 1e-6 --qk-layernorm
    --swiglu --disable-bias-linear
    --attention-softmax-in-fp32 --attention-dropout 0.0 --hidden-dropout 0.0
    --init-method-std 0.01
)

OPTIMIZE_ARGS=(
    --use-flash-attn --use-fused-rotary-pos-emb --use-fused-swiglu --use-fused-rmsnorm
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)

TRAIN_ARGS=(
    --micro-batch-size "$MBS" --global-batch-size "$GBS" --seq-length "$SEQ_LENGTH"
    --train-iters "$TRAIN_ITERS" --seed 42 --bf16
    --lr 1.25e-6 --min-lr 1.25e-7 --lr-decay-style cosine --lr-warmup-fraction 0.01
    --weight-decay 1e-1 --clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.95
)

TUNE_ARGS=(
    --stage sft --is-instruction-dataset --prompt-type qwen3 --no-pad-to-seq-lengths
    --lora-r 8 --lora-alpha 16 --lora-target-modules linear_qkv linear_proj linear_fc1 linear_fc2
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
    "$@" 2>&1 | tee "logs/tune_qwen3_0point6b_4K_lora_ptd_$(date +%Y%m%d_%H%M%S).log"
