"""The random numbers of a rank, under the names that Megatron gives them in a checkpoint, as plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

from mindspeed_llm.platform import random
from mindspeed_llm.tasks.checkpoint.torch_file import Inert, StoredTensor

_KEYS = 624
_PRIME = 1_000_003


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a rank stands, as far as its random numbers depend on it."""

    tp: tuple[int, int]
    pp: tuple[int, int]
    dp: tuple[int, int]
    ep: tuple[int, int]
    etp: tuple[int, int]

    @classmethod
    def here(cls) -> Place:
        """Of this process; each as (rank, number of ranks)."""
        state = parallel_state
        return cls(
            tp=(state.get_tensor_model_parallel_rank(), state.get_tensor_model_parallel_world_size()),
            pp=(state.get_pipeline_model_parallel_rank(), state.get_pipeline_model_parallel_world_size()),
            dp=(
                state.get_data_parallel_rank(with_context_parallel=True),
                state.get_data_parallel_world_size(with_context_parallel=True),
            ),
            ep=(state.get_expert_model_parallel_rank(), state.get_expert_model_parallel_world_size()),
            etp=(state.get_expert_tensor_parallel_rank(), state.get_expert_tensor_parallel_world_size()),
        )


def own_state() -> dict[str, Any]:
    """The state of all generators of this rank, and its place; numbers, strings and tensors only."""
    state = random.rng_state()
    version, words, gauss = state["python"]
    name, keys, *rest = state["numpy"]
    return {
        "random_rng_state": (version, tuple(words.tolist()), gauss),
        # numpy's own state holds an array, which takes code to unpickle; Megatron reads numbers as well.
        "np_rng_state": (name, keys.tolist(), *rest),
        "torch_rng_state": state["torch"],
        "cuda_rng_state": state["device"],
        "rng_tracker_states": {name: _tensor(value) for name, value in get_cuda_rng_tracker().get_states().items()},
        "device_type": state["device_type"],
        "place": asdict(Place.here()),
    }


def choose(states: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The state that belongs to this rank, of those saved for its tensor and pipeline rank, in data-parallel order.

    Data-parallel ranks draw the same numbers: where their number has changed, any with the same experts will do. None
    where there is none.
    """
    here = asdict(Place.here())
    if all("place" not in state for state in states):
        # Megatron saves one for all data-parallel ranks, or one for each.
        return states[here["dp"][0] if len(states) == here["dp"][1] else 0] if states else None
    known = [state for state in states if "place" in state]
    for names in (("tp", "pp", "ep", "etp", "dp"), ("tp", "pp", "ep", "etp")):
        for state in known:
            if all(tuple(state["place"].get(name) or ()) == here[name] for name in names):
                return state
    return None


def restore(state: Mapping[str, Any]) -> None:
    """Set all generators of this rank.

    Raises:
        ValueError, TypeError, KeyError, RuntimeError: it is no such state.
    """
    version, words, gauss = state["random_rng_state"]
    name, keys, *rest = state["np_rng_state"]
    kind = random.rng_state()["device_type"]
    saved_kind = state.get("device_type", kind)
    random.set_rng_state(
        {
            "python": [version, torch.tensor(words, dtype=torch.int64), gauss],
            "numpy": [name, torch.tensor(_numbers(keys), dtype=torch.int64), *rest],
            "torch": _tensor(state["torch_rng_state"]),
            "device_type": saved_kind,
            "device": None if kind == "cpu" or saved_kind != kind else _tensor(state["cuda_rng_state"]),
        }
    )
    if saved_kind == kind:
        tracker = get_cuda_rng_tracker()
        saved = {name: _tensor(value) for name, value in state["rng_tracker_states"].items()}
        tracker.set_states({**tracker.get_states(), **saved})


def reseed(seed: int, iteration: int) -> None:
    """Seed anew where no saved state fits: with other numbers than at the start of the run, so that what was drawn
    there is not drawn again.
    """
    seed += _PRIME * iteration + 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed_everything(seed, deterministic=torch.are_deterministic_algorithms_enabled())
    model_parallel_cuda_manual_seed(seed)


def _tensor(value: Any) -> torch.Tensor:
    if isinstance(value, StoredTensor):
        return value.view().clone()
    return value.get_state() if isinstance(value, torch.Generator) else value


def _numbers(keys: Any) -> list[int]:
    """The words of numpy's generator: numbers here, an array in what Megatron writes. That comes as the remains of a
    pickled object, whose state is (version, shape, dtype, order, bytes).
    """
    if not isinstance(keys, Inert):
        return [int(key) for key in keys]
    data = keys.state[4]
    if isinstance(data, Inert):
        # Bytes in pickles of protocol 2: a string, and its encoding.
        data = data.values[0].encode("latin1")
    if len(data) != 4 * _KEYS:
        raise ValueError(f"a state of numpy's generator with {len(data)} bytes, expected {4 * _KEYS}")
    return torch.frombuffer(bytearray(data), dtype=torch.int32).to(torch.int64).bitwise_and(0xFFFFFFFF).tolist()
