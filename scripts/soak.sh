#!/usr/bin/env bash
# Jobs that are too long for the tests: bash scripts/soak.sh [--here] <job> [job options]
#
#   sft_smollm2 [--data FILE]  fine-tune SmolLM2-135M-Instruct on 64 alpaca records for 20 steps with 2 processes: the
#                              eval loss must fall, and the exported model must answer under its chat template.
#                              FILE is an alpaca json or jsonl; default: ../shared/data/sft/alpaca_en_demo.json where
#                              it exists, else records made from Python's manual.  [5 to 9 minutes on 2 cores]
#   kill_while_saving [--kills N] [--seed N] [--ranks N]
#                              kill all ranks of a toy's training at random moments inside a save (20 times, half of
#                              them with save_async), resume each time, and compare with a run that was never killed.
#                              [about 3 minutes on 2 cores]
#   mcore_kill [--kills N] [--seed N] [--ranks N]
#                              the same for pretrain_gpt.py, half of the kills with --ckpt-format torch and half with
#                              torch_dist. [about 5 minutes on 2 cores]
#   mcore_smollm2 [--data FILE] [--steps N]
#                              continue pre-training SmolLM2-135M with pretrain_gpt.py for 10 steps, with two pipeline
#                              stages and with two data-parallel ranks: the loss of each step must be that of
#                              train_fsdp2.py on the same samples; two tensor-parallel ranks must be refused. FILE is
#                              text, {"text": ...} on each line; default: made from Python's manual.
#                              [about 5 minutes on 2 cores]
#   lora_smollm2 [--data FILE]  train adapters on SmolLM2-135M-Instruct with 200 alpaca records for 40 steps, on both
#                              backends from one adapter of PEFT: the losses of each step and of 20 held-out records
#                              must agree within 1e-3, and the latter must fall. FILE is an alpaca json or jsonl with
#                              220 records of at most 128 tokens; default: ../shared/data/sft/alpaca_en_demo.json.
#                              [about 5 minutes on 2 cores]
#   dpo_smollm2 [--data FILE]  the same with preference pairs for 20 steps (--stage dpo): the margin of 10 held-out pairs
#                              must rise. Replies are cut to 240 characters. FILE holds pairs in the style of sharegpt,
#                              42 of at most 128 tokens a side; default: ../shared/data/sft/dpo_en_demo.json.
#                              [about 5 minutes on 2 cores]
#   generate_smollm2 [--prompts N] [--tokens N]
#                              greedy answers of SmolLM2-135M-Instruct to 32 prompts of 4 to 120 tokens, 64 tokens each,
#                              from its directory, from a checkpoint of the FSDP2 backend, and by the Megatron backend on
#                              one rank and in two stages, one by one and with eight in work: each token must be that of
#                              transformers.generate. [about 15 minutes on 2 cores]
#   lm_eval_smollm2 [--data DIR] [--limit N]
#                              score SmolLM2-135M-Instruct with evaluation.py and with lm-eval: prompts, numbers, texts
#                              and verdicts of every sample must agree. Questions of our own are asked for mmlu (both
#                              ways), ceval, cmmlu, hellaswag, boolq, agieval and human_eval, and those of DIR in its
#                              folders mmlu, gsm8k, bbh, cmmlu, agieval and human_eval, as far as they are there; default:
#                              ../shared/data/eval. N samples of each subject, by default 20. Programs that the model
#                              writes are run. Then our own questions are asked under the chat template.
#                              [some three hours on 2 cores]
#   convert_grid [--family NAME] [--rows N] [--seed N]
#                              convert a toy of each model family in all 108 ways to cut it (TP, PP, virtual stages, EP,
#                              expert TP), to a Megatron checkpoint and back: bit-identical, or refused for the reason
#                              that it should be. How parameters are stored follows from the seed. NAME is a toy or a
#                              value of --model-type-hf.  [about 10 minutes on one core]
#   whole_grids [TESTS]        all rows of the grids of which each test run takes a fixed sample only, and the tests that
#                              are too long for it; by default of all tests.  [some hours on 2 cores]
#
# Results go to output/soak/<job> (SOAK_OUT names another folder); NPROC sets the number of processes.
set -euo pipefail
invoked_from=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/common.sh
. scripts/common.sh

usage() { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' scripts/soak.sh; }
NPROC=${NPROC:-2} SOAK_OUT=${SOAK_OUT:-$REPOSITORY/output/soak}
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 HF_HUB_DISABLE_PROGRESS_BARS=1 TOKENIZERS_PARALLELISM=false

# torchrun with as many threads as the machine has for each process.
train() {
    OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(threads_per_process "$NPROC")} \
        "$PY" -m torch.distributed.run --standalone --nproc_per_node "$NPROC" train_fsdp2.py "$@"
}

# `--data FILE`: sets the caller's variable `data`.
data_file() {
    [ $# -ge 2 ] || die "--data: expected a file after it"
    data=$2
    [[ "$data" == /* ]] || data=$invoked_from/$data
    [ -f "$data" ] || die "--data $data: no such file"
}

job_sft_smollm2() {
    local data=../shared/data/sft/alpaca_en_demo.json out=$SOAK_OUT/sft_smollm2
    while [ $# -gt 0 ]; do
        case "$1" in
        --data)
            data_file "$@"
            shift 2
            ;;
        *) die "sft_smollm2: unknown option $1 (known: --data FILE)" ;;
        esac
    done
    setup_environment "$here" demo
    mkdir -p "$out"
    "$PY" scripts/demo_model.py --out "$out/model"
    if [ ! -f "$data" ]; then
        "$PY" scripts/demo_text.py --format alpaca --out "$out/data"
        data=$out/data/train.jsonl
    fi
    say "fine-tuning on $data"
    rm -rf "$out/run"
    train examples/fsdp2/smollm2/tune_smollm2_135m_cpu.yaml \
        --model.model_name_or_path "$out/model" \
        --data.dataset "{\"file_name\": \"$data\", \"formatting\": \"alpaca\"}" \
        --training.output_dir "$out/run"
    "$PY" scripts/show_run.py "$out/run" --require-improvement --max-new-tokens 60 \
        --chat "Name three primary colours."
}

job_kill_while_saving() {
    setup_environment "$here" dev
    OMP_NUM_THREADS=1 "$PY" -m tests.support.kill "$@"
}

job_lm_eval_smollm2() {
    local data=../shared/data/eval limit=20 out=$SOAK_OUT/lm_eval_smollm2
    while [ $# -gt 0 ]; do
        case "$1" in
        --data)
            [ $# -ge 2 ] || die "--data: expected a folder after it"
            data=$2
            [[ "$data" == /* ]] || data=$invoked_from/$data
            shift 2
            ;;
        --limit)
            [[ "${2:-}" =~ ^[1-9][0-9]*$ ]] || die "--limit ${2:-}: expected a whole number above 0"
            limit=$2
            shift 2
            ;;
        *) die "lm_eval_smollm2: unknown option $1 (known: --data DIR, --limit N)" ;;
        esac
    done
    [ -d "$data/mmlu" ] || die "--data $data: no folder mmlu in it"
    setup_environment "$here" dev,demo
    rm -rf "$out/runs" "$out/chat"
    mkdir -p "$out/runs" "$out/chat/data"
    "$PY" scripts/demo_model.py --out "$out/model"
    "$PY" -m tests.tasks.evaluation.lm_eval_parity --model "$out/model" --data "$data" --folder "$out/runs" \
        --limit "$limit"
    # The folder of data is empty: only our own questions are asked.
    "$PY" -m tests.tasks.evaluation.lm_eval_parity --model "$out/model" --data "$out/chat/data" --folder "$out/chat" \
        --chat --limit "$limit"
}

job_convert_grid() {
    setup_environment "$here" dev
    OMP_NUM_THREADS=1 "$PY" -m tests.tasks.checkpoint.grid "$@"
}

job_whole_grids() {
    [ $# -gt 0 ] || set -- tests
    setup_environment "$here" dev
    OMP_NUM_THREADS=1 MINDSPEED_WHOLE_GRIDS=1 "$PY" -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder "$@"
}

job_mcore_kill() {
    setup_environment "$here" dev
    OMP_NUM_THREADS=1 "$PY" -m tests.training.checkpointing.kill "$@"
}

job_mcore_smollm2() {
    local data="" out=$SOAK_OUT/mcore_smollm2 options=()
    while [ $# -gt 0 ]; do
        case "$1" in
        --data)
            data_file "$@"
            shift 2
            ;;
        --steps)
            [[ "${2:-}" =~ ^[1-9][0-9]*$ ]] || die "--steps ${2:-}: expected a whole number above 0"
            options+=(--steps "$2")
            shift 2
            ;;
        *) die "mcore_smollm2: unknown option $1 (known: --data FILE, --steps N)" ;;
        esac
    done
    setup_environment "$here" dev,demo
    mkdir -p "$out"
    "$PY" scripts/demo_model.py --out "$out/model"
    if [ -z "$data" ]; then
        "$PY" scripts/demo_text.py --out "$out/data"
        data=$out/data/train.jsonl
    fi
    say "training on $data with both backends"
    rm -rf "$out/runs"
    "$PY" -m tests.training.smollm2 --model "$out/model" --data "$data" --out "$out/runs" \
        ${options[@]+"${options[@]}"}
}

job_generate_smollm2() {
    setup_environment "$here" dev,demo
    mkdir -p "$SOAK_OUT/generate_smollm2"
    "$PY" scripts/demo_model.py --out "$SOAK_OUT/generate_smollm2/model"
    local compare=(tests.tasks.inference.smollm2 --model "$SOAK_OUT/generate_smollm2/model"
        --wanted "$SOAK_OUT/generate_smollm2/wanted.json" "$@")
    rm -f "$SOAK_OUT/generate_smollm2/wanted.json"
    "$PY" -m "${compare[@]}"
    "$PY" -m "${compare[@]}" --megatron
    "$PY" -m torch.distributed.run --standalone --nproc_per_node 2 -m "${compare[@]}" --megatron
}

# Both backends on the same records; takes the name of the job, its default data and its options.
both_backends() {
    local job=$1 data=$2 out=$SOAK_OUT/${1}_smollm2
    shift 2
    while [ $# -gt 0 ]; do
        case "$1" in
        --data)
            data_file "$@"
            shift 2
            ;;
        *) die "${job}_smollm2: unknown option $1 (known: --data FILE)" ;;
        esac
    done
    [ -f "$data" ] || die "--data $data: no such file"
    setup_environment "$here" dev,demo
    mkdir -p "$out"
    "$PY" scripts/demo_model.py --out "$out/model"
    say "training on $data with both backends"
    rm -rf "$out/runs"
    "$PY" -m tests.tasks.posttrain.smollm2 "$job" --model "$out/model" --data "$data" --out "$out/runs"
}

here=0
if [ "${1:-}" = --here ]; then
    here=1
    shift
fi
case "${1:-}" in
-h | --help) usage ;;
"") usage >&2 && die "which job?" ;;
sft_smollm2) job_sft_smollm2 "${@:2}" ;;
kill_while_saving) job_kill_while_saving "${@:2}" ;;
mcore_kill) job_mcore_kill "${@:2}" ;;
mcore_smollm2) job_mcore_smollm2 "${@:2}" ;;
lm_eval_smollm2) job_lm_eval_smollm2 "${@:2}" ;;
lora_smollm2) both_backends lora ../shared/data/sft/alpaca_en_demo.json "${@:2}" ;;
dpo_smollm2) both_backends dpo ../shared/data/sft/dpo_en_demo.json "${@:2}" ;;
generate_smollm2) job_generate_smollm2 "${@:2}" ;;
convert_grid) job_convert_grid "${@:2}" ;;
whole_grids) job_whole_grids "${@:2}" ;;
*)
    die "unknown job $1 (known: sft_smollm2, kill_while_saving, mcore_kill, mcore_smollm2, lora_smollm2, dpo_smollm2," \
        "generate_smollm2, lm_eval_smollm2, convert_grid, whole_grids)"
    ;;
esac
