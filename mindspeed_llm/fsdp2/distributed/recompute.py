"""Activation recomputation on chosen modules."""

from __future__ import annotations

import functools

from torch import nn
from torch.utils.checkpoint import checkpoint


def apply_recompute(modules: dict[str, nn.Module]) -> None:
    """Let each module drop its activations in forward and compute them again in backward (non-reentrant checkpoint).

    The instance's `forward` is wrapped instead of putting a wrapper module around it, so that parameter names stay as
    they are in the weight files; FSDP's hooks, which sit around `forward`, stay outside of the recomputed part.
    """
    for module in modules.values():
        module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)
