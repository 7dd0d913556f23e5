#!/usr/bin/env bash
# bash examples/fsdp2/smollm2/dpo_smollm2_135m_cpu.sh [--section.field value ...]
# NPROC sets the number of processes (default 2).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
torchrun --standalone --nproc_per_node "${NPROC:-2}" \
    train_fsdp2.py examples/fsdp2/smollm2/dpo_smollm2_135m_cpu.yaml "$@"
