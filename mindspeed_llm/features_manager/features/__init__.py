"""The features of the Megatron backend, one file each."""

from __future__ import annotations

from mindspeed_llm.features_manager.feature import Feature
from mindspeed_llm.features_manager.features.cuda_spots import CudaSpots

# In the order in which their wrappers of one target stack: the first one innermost.
FEATURES: tuple[Feature, ...] = (CudaSpots(),)
