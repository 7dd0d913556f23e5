"""The weights of all ranks of a Megatron model put together under the names of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mindspeed_llm.tasks.checkpoint.arguments import from_hf_config
from mindspeed_llm.tasks.checkpoint.boxes import take
from mindspeed_llm.tasks.checkpoint.families import of_config
from mindspeed_llm.tasks.checkpoint.hf_reader import read_config
from mindspeed_llm.tasks.checkpoint.layout import Rank
from mindspeed_llm.tasks.checkpoint.model import bind
from mindspeed_llm.tasks.models.hf_weights import topology_of


def hub_weights(folder: Path, rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Names as in files on the hub (experts one by one)."""
    config = read_config(folder)
    family = of_config(config, str(folder))
    topology = topology_of(rows[0]["args"])
    model = bind(family, from_hf_config(family, config, str(folder)), topology)
    expected = model.hf_tensors()
    found = {name: torch.full(tensor.view, torch.nan) for name, tensor in expected.items()}
    for row in rows:
        tp, pp, ep = row["place"]
        states = {f"model{i}" if topology.is_virtual else "model": state for i, state in enumerate(row["states"])}
        for tensor in model.rank_tensors(Rank(tp=tp, pp=pp, ep=ep)):
            values = states[tensor.chunk][tensor.key].view(tensor.view)
            for name, piece in tensor.pieces:
                take(found[name], piece.hf_box).copy_(piece.as_hf(take(values, piece.mg_box)))
    return {name: values.reshape(expected[name].shape) for name, values in found.items()}
