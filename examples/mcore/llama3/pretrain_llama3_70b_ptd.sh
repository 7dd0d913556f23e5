#!/usr/bin/env bash
# Pre-train Llama 3 70B on 8 nodes of 8 devices (TP 8, PP 4 of 5 layers a turn); Ascend NPU or CUDA.
#   bash examples/mcore/llama3/pretrain_llama3_70b_ptd.sh [more flags of pretrain_gpt.py ...]
# Environment: NPUS_PER_NODE, NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT, DATA_PATH, TOKENIZER_PATH, CKPT_LOAD_DIR,
# CKPT_SAVE_DIR, TP, PP, VPP, MBS, GBS, SEQ_LENGTH, TRAIN_ITERS. Of a flag given twice the last one counts: append
# what shall differ, --check too. Relative paths start at the root of the repository.
# The same in short, with all sizes of the model from its config.json:
#   torchrun --nproc_per_node 8 --nnodes 8 --node_rank 0 --master_addr HOST --master_port 6000 pretrain_gpt.py \
#       --model-from-hf ./model_from_hf/llama3_70b_hf/ --load ./model_from_hf/llama3_70b_hf/ \
#       --data-path ./dataset/enwiki_llama3_text_document --split 100,0,0 --tensor-model-parallel-size 8 \
#       --sequence-parallel --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 5 --bf16 \
#       --seq-length 8192 --micro-batch-size 1 --global-batch-size 128 --train-iters 2000 --lr 1.25e-6 \
#       --min-lr 1.25e-7 --lr-decay-style cosine --lr-warmup-fraction 0.01 --weight-decay 0.1 --adam-beta2 0.95 \
#       --attention-dropout 0 --hidden-dropout 0 --use-flash-attn --use-fused-rmsnorm --use-fused-swiglu \
#       --use-fused-rotary-pos-emb --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather \
#       --reuse-fp32-param --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 \
#       --eval-iters 0 --log-interval 1 --save ./ckpt/llama3_70b/ --ckpt-format torch
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
source examples/mcore/env_config.sh

NPUS_PER_NODE="${NPUS_PER_NODE:-8}"
NNODES="${NNODES:-8}"
NODE_RANK="${NODE_RANK:-0}"
MASTER_ADDR="${MASTER_ADDR:-localhost}"
MASTER_PORT="${MASTER_PORT:-6000}"

# Token ids: what preprocess_data.py writes, without .bin and .idx. Or raw text, tokenized once.
DATA_PATH="${DATA_PATH:-./dataset/enwiki_llama3_text_document}"
TOKENIZER_PATH="${TOKENIZER_PATH:-./model_from_hf/llama3_70b_hf/}"
# Where weights come from: a Hugging Face directory, or a folder of checkpoints, CKPT_SAVE_DIR to go on with a run.
# One of convert_ckpt_v2.py has weights only: append --no-load-optim --no-load-rng. Empty: initial weights.
CKPT_LOAD_DIR="${CKPT_LOAD_DIR-./model_from_hf/llama3_70b_hf/}"
CKPT_SAVE_DIR="${CKPT_SAVE_DIR:-./ckpt/llama3_70b/}"

TP="${TP:-8}"
PP="${PP:-4}"
# Layers of a virtual stage.
VPP="${VPP:-5}"
MBS="${MBS:-1}"
GBS="${GBS:-128}"
SEQ_LENGTH="${SEQ_LENGTH:-8192}"
TRAIN_ITERS="${TRAIN_ITERS:-2000}"

DISTRIBUTED_ARGS=(
    --nproc_per_node "$NPUS_PER_NODE" --nnodes "$NNODES" --node_rank "$NODE_RANK"
    --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT"
)

MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size "$TP" --sequence-parallel
    --pipeline-model-parallel-size "$PP"
    --num-layers-per-virtual-pipeline-stage "$VPP"
)

GPT_ARGS=(
    --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672
    --num-attention-heads 64 --group-query-attention --num-query-groups 8
    --padded-vocab-size 128256 --max-position-embeddings 8192
    --position-embedding-type rope --rotary-base 500000
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
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
)

TRAIN_ARGS=(
    --micro-batch-size "$MBS" --global-batch-size "$GBS" --seq-length "$SEQ_LENGTH"
    --train-iters "$TRAIN_ITERS" --seed 42 --bf16
    --lr 1.25e-6 --min-lr 1.25e-7 --lr-decay-style cosine --lr-warmup-fraction 0.01
    --weight-decay 1e-1 --clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.95
)

DATA_ARGS=(
    --data-path "$DATA_PATH" --split "100,0,0"
    --tokenizer-type PretrainedFromHF --tokenizer-name-or-path "$TOKENIZER_PATH"
)

OUTPUT_ARGS=(
    --save "$CKPT_SAVE_DIR" --save-interval 2000 --ckpt-format torch
    --log-interval 1 --eval-iters 0
)

if [[ -n "$CKPT_LOAD_DIR" ]]; then
    OUTPUT_ARGS+=(--load "$CKPT_LOAD_DIR")
fi

mkdir -p logs
# pipefail: the exit code is torchrun's, not tee's.
torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_gpt.py \
    "${MODEL_PARALLEL_ARGS[@]}" \
    "${GPT_ARGS[@]}" \
    "${OPTIMIZE_ARGS[@]}" \
    "${TRAIN_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    "${OUTPUT_ARGS[@]}" \
    "$@" 2>&1 | tee "logs/pretrain_llama3_70b_ptd_$(date +%Y%m%d_%H%M%S).log"
