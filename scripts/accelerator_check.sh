#!/usr/bin/env bash
# Check this machine's accelerator with the package's own training: bash scripts/accelerator_check.sh [--here] [options]
#
# Trains in bf16, compares a toy step with the CPU in fp32, reports tokens/s, MFU and memory against the plan of --check,
# saves and resumes, and records a profile. One table at the end; exit code 1 if any check fails. Under 6 minutes.
# Without an accelerator it runs the same commands at toy size (a dry run of the checks, not of a device).
#
#   --here          use the active environment
#   --model DIR     Hugging Face directory for the bf16 training (default: one of SmolLM2's size with random weights)
#   --ranks N       processes (default: all devices; 2 without an accelerator)
#   --out DIR       folder for all files (default: output/accelerator_check)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/common.sh
. scripts/common.sh
here=0
case "${1:-}" in
--here)
    here=1
    shift
    ;;
-h | --help)
    sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' scripts/accelerator_check.sh
    exit 0
    ;;
esac
setup_environment "$here" ""
exec "$PY" scripts/accelerator_check.py "$@"
