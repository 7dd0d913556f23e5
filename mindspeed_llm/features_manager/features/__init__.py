"""The features of the Megatron backend, one file each."""

from __future__ import annotations

from mindspeed_llm.features_manager.feature import Feature
from mindspeed_llm.features_manager.features.any_device import AnyDevice
from mindspeed_llm.features_manager.features.deterministic_mode import DeterministicMode
from mindspeed_llm.features_manager.features.flash_attention import FlashAttention
from mindspeed_llm.features_manager.features.fused_rmsnorm import FusedRmsnorm
from mindspeed_llm.features_manager.features.fused_rotary import FusedRotary
from mindspeed_llm.features_manager.features.fused_swiglu import FusedSwiglu
from mindspeed_llm.features_manager.features.lora import Lora
from mindspeed_llm.features_manager.features.lu_lora import LuLora
from mindspeed_llm.features_manager.features.noop_layers import NoopLayers
from mindspeed_llm.features_manager.features.num_layer_list import NumLayerList
from mindspeed_llm.features_manager.features.overlapped_linears import OverlappedLinears
from mindspeed_llm.features_manager.features.profiling import Profiling
from mindspeed_llm.features_manager.features.recompute_activation_function import RecomputeActivationFunction
from mindspeed_llm.features_manager.features.recompute_layers_per_stage import RecomputeLayersPerStage
from mindspeed_llm.features_manager.features.recompute_norm import RecomputeNorm
from mindspeed_llm.features_manager.features.reuse_fp32_param import ReuseFp32Param
from mindspeed_llm.features_manager.features.selective_recompute import SelectiveRecompute

# In the order in which their wrappers of one target stack: the first one innermost.
FEATURES: tuple[Feature, ...] = (
    AnyDevice(),
    FlashAttention(),
    FusedRmsnorm(),
    FusedSwiglu(),
    FusedRotary(),
    OverlappedLinears(),
    NumLayerList(),
    NoopLayers(),
    SelectiveRecompute(),
    RecomputeNorm(),
    RecomputeActivationFunction(),
    RecomputeLayersPerStage(),
    ReuseFp32Param(),
    Lora(),
    LuLora(),
    DeterministicMode(),
    Profiling(),
)
