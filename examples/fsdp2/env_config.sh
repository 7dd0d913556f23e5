# shellcheck shell=bash
# Environment of FSDP2 runs; the scripts of this folder source it. A value that is already set is kept.
# Settings of other hardware than the machine has are ignored there.

# Deterministic matrix products on CUDA (training.deterministic).
export CUBLAS_WORKSPACE_CONFIG="${CUBLAS_WORKSPACE_CONFIG:-:4096:8}"

# Ascend: seconds to wait for the other ranks when collectives start.
export HCCL_CONNECT_TIMEOUT="${HCCL_CONNECT_TIMEOUT:-1800}"
# Ascend: two-level queue between host and device.
export TASK_QUEUE_ENABLE="${TASK_QUEUE_ENABLE:-2}"
# Ascend: bind host threads to the cores next to their device.
export CPU_AFFINITY_CONF="${CPU_AFFINITY_CONF:-1}"
# Ascend: let streams reuse each other's memory; grow memory segments instead of fragmenting them.
export MULTI_STREAM_MEMORY_REUSE="${MULTI_STREAM_MEMORY_REUSE:-2}"
export PYTORCH_NPU_ALLOC_CONF="${PYTORCH_NPU_ALLOC_CONF:-expandable_segments:True}"
