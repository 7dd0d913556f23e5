# shellcheck shell=bash
# Environment of runs on the Megatron backend; the scripts of the folders beside it source it. A value that is already
# set is kept. Settings of other hardware than the machine has are ignored there.

# CUDA: kernels start in the order in which they are issued, so that collectives begin before what they overlap with.
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"

# Ascend: seconds to wait for the other ranks when collectives start.
export HCCL_CONNECT_TIMEOUT="${HCCL_CONNECT_TIMEOUT:-1800}"
# Ascend: two-level queue between host and device.
export TASK_QUEUE_ENABLE="${TASK_QUEUE_ENABLE:-2}"
# Ascend: bind host threads to the cores next to their device.
export CPU_AFFINITY_CONF="${CPU_AFFINITY_CONF:-1}"
# Ascend: grow memory segments instead of fragmenting them.
export PYTORCH_NPU_ALLOC_CONF="${PYTORCH_NPU_ALLOC_CONF:-expandable_segments:True}"
