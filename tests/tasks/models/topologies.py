"""Topologies that models are compared on: a number of ranks and the arguments that spread the model over them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

TP2: dict[str, Any] = {"tensor_model_parallel_size": 2}
SP: dict[str, Any] = {"sequence_parallel": True}
PP2: dict[str, Any] = {"pipeline_model_parallel_size": 2}
VPP: dict[str, Any] = {"num_layers_per_virtual_pipeline_stage": 1}
EP2: dict[str, Any] = {"expert_model_parallel_size": 2}
ETP1: dict[str, Any] = {"expert_tensor_parallel_size": 1}
ALLTOALL: dict[str, Any] = {"moe_token_dispatcher_type": "alltoall"}
GROUPED: dict[str, Any] = {"moe_grouped_gemm": True}

Topology = tuple[int, dict[str, Any]]
ANY_MODEL: dict[str, Topology] = {
    "tp1": (1, {}),
    "dp2": (2, {}),
    "tp2-sp": (2, TP2 | SP),
    "pp2": (2, PP2),
    "pp2-vpp2": (2, PP2 | VPP),
}
DENSE_ONLY: dict[str, Topology] = {
    "tp2": (2, TP2),
    "tp2-pp2": (4, TP2 | PP2),
}
"""Experts under tensor parallelism are refused without sequence parallelism."""
WITH_EXPERTS: dict[str, Topology] = {
    "grouped": (1, GROUPED),
    "ep2": (2, EP2),
    "ep2-alltoall-grouped": (2, EP2 | ALLTOALL | GROUPED),
    "tp2-sp-etp1": (2, TP2 | SP | ETP1),
    "tp2-sp-etp1-alltoall-grouped": (2, TP2 | SP | ETP1 | ALLTOALL | GROUPED),
    "ep2-tp2-sp": (4, EP2 | TP2 | SP),
    "ep2-tp2-sp-alltoall": (4, EP2 | TP2 | SP | ALLTOALL),
    "ep2-tp2-sp-alltoall-grouped": (4, EP2 | TP2 | SP | ALLTOALL | GROUPED),
    "ep2-tp2-sp-etp1-alltoall": (4, EP2 | TP2 | SP | ETP1 | ALLTOALL),
    "ep2-pp2-vpp2": (4, EP2 | PP2 | VPP | ALLTOALL),
}


def rows(names: Iterable[str], topologies: dict[str, Topology]) -> list[tuple[str, str, int, dict[str, Any]]]:
    """(toy, topology, ranks, arguments) for all pairs."""
    return [(name, topology, ranks, values) for name in names for topology, (ranks, values) in topologies.items()]
