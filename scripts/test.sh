#!/usr/bin/env bash
# Set up the environment, then lint, formatting and tests: bash scripts/test.sh [--here] [pytest arguments]
#
#   bash scripts/test.sh                         everything
#   bash scripts/test.sh tests/fsdp2 -k packing  a selection
#   bash scripts/test.sh --here                  in the active environment instead of .venv
#
# Ends non-zero when lint, formatting or a test fails, and also when no test ran (all skipped or none selected).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/common.sh
. scripts/common.sh

here=0
arguments=()
for argument in "$@"; do
    case "$argument" in
    --here) here=1 ;;
    -h | --help)
        sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' scripts/test.sh
        exit 0
        ;;
    *) arguments+=("$argument") ;;
    esac
done

setup_environment "$here" dev,demo,eval
say "ruff"
"$PY" -m ruff check .
"$PY" -m ruff format --check .

say "pytest"
# Ranks of the test pool share the cores; more threads each would only make them wait for one another.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Hundreds of commands are started: none need compile the package's sources again.
unset PYTHONDONTWRITEBYTECODE
report=$(mktemp)
trap 'rm -f "$report"' EXIT
# Files of tests are shared out over the cores, up to four; each share has a pool of ranks of its own. (With
# OMP_NUM_THREADS set, nproc would say that instead.) They start in the order that tests/conftest.py gives them.
shares=$(env -u OMP_NUM_THREADS nproc)
"$PY" -m pytest -n "$((shares < 4 ? shares : 4))" --dist loadfile --no-loadscope-reorder \
    --junitxml="$report" ${arguments[@]+"${arguments[@]}"}
"$PY" scripts/count_tests.py "$report"
