"""The adapters of all ranks put together under the names of PEFT."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mindspeed_llm.tasks.checkpoint.adapter import adapter_model
from mindspeed_llm.tasks.checkpoint.arguments import from_hf_config
from mindspeed_llm.tasks.checkpoint.boxes import take
from mindspeed_llm.tasks.checkpoint.families import of_config
from mindspeed_llm.tasks.checkpoint.hf_reader import read_config
from mindspeed_llm.tasks.checkpoint.layout import Rank
from mindspeed_llm.tasks.checkpoint.lora import places
from mindspeed_llm.tasks.models.hf_weights import topology_of


def hub_adapter(
    folder: Path, rows: Sequence[dict[str, Any]], what: str = "states", *, copies_alike: bool = True
) -> dict[str, Tensor]:
    """Of an A that modules share the first one's, as the tables of the converter say. Copies on several ranks must be
    alike, unless told otherwise.
    """
    config, args = read_config(folder), rows[0]["args"]
    family = of_config(config, str(folder))
    form = [place for place in places(family) if place.target in args.lora_target_modules]
    topology = topology_of(args)
    model = adapter_model(family, from_hf_config(family, config, str(folder)), args.lora_r, form, topology)
    copies = model.written_copies
    expected = {name: tensor for name, tensor in model.hf_tensors().items() if name not in copies}
    found = {name: torch.full(tensor.view, torch.nan) for name, tensor in expected.items()}
    used = 0
    for row in rows:
        tp, pp, ep = row["place"]
        states = {f"model{i}" if topology.is_virtual else "model": state for i, state in enumerate(row[what])}
        for tensor in model.rank_tensors(Rank(tp=tp, pp=pp, ep=ep)):
            values = states[tensor.chunk][tensor.key].view(tensor.view)
            used += 1
            for name, piece in tensor.pieces:
                part, mine = take(found[name], piece.hf_box), piece.as_hf(take(values, piece.mg_box))
                # What several ranks have is the same on each of them.
                assert not copies_alike or part.isnan().any() or (part - mine).abs().max() <= 1e-5 * part.abs().max(), (
                    name,
                    row["place"],
                )
                part.copy_(mine)
    assert used == sum(len(state) for row in rows for state in row[what]), "a parameter has no place in the tables"
    assert not any(values.isnan().any() for values in found.values())
    return {name: values.reshape(expected[name].shape) for name, values in found.items()}
