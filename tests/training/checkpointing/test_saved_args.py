"""What a checkpoint's arguments say, against those of a run."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.checkpoint.torch_file import read_torch_file
from mindspeed_llm.training.checkpointing.saved_args import check_structure, check_topology, plain_args
from tests.training.arguments.lines import arguments

FOLDER = Path("run/iter_0000005")


def saved(**changes: Any) -> dict[str, Any]:
    return {**vars(plain_args(arguments())), **changes}


def test_only_plain_values_are_kept(tmp_path: Path) -> None:
    args = Namespace(
        number=1,
        path=Path("a/b"),
        words=["x", ("y", 2.5)],
        table={"a": {1, 2}},
        function=print,
        dtype=torch.float32,
        given=("number",),
        nested=[print],
    )
    kept = plain_args(args, iteration=7)
    expected = {"number": 1, "path": "a/b", "words": ["x", ("y", 2.5)], "table": {"a": {1, 2}}, "iteration": 7}
    assert vars(kept) == expected
    torch.save(kept, tmp_path / "args.pt")
    assert vars(read_torch_file(tmp_path / "args.pt")) == expected


def test_arguments_of_this_program_agree_with_themselves() -> None:
    args = arguments()
    assert check_structure(saved(), args, FOLDER) is None
    check_topology(saved(), args, FOLDER)


def test_what_is_not_said_is_not_compared() -> None:
    args = arguments()
    for said in ({}, {"hidden_size": None}, {"num_layers": 4, "num_attention_heads": 6, "num_query_groups": 2}):
        assert check_structure(said, args, FOLDER) is None
        check_topology(said, args, FOLDER)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": 64}, "--hidden-size 48 instead of 64;"),
        ({"num_layers": 6}, "--num-layers 4 instead of 6;"),
        (
            {"num_query_groups": 3, "kv_channels": 8},
            "--num-query-groups 2 instead of 3, --kv-channels 16 instead of 8;",
        ),
        ({"group_query_attention": False}, "--num-query-groups 2 instead of 6;"),
        ({"num_experts": 8}, None),
        ({"add_qkv_bias": True}, "--add-qkv-bias off instead of on;"),
    ],
)
def test_another_structure(changes: dict[str, Any], said: str | None) -> None:
    args = arguments()
    if said is None:
        # A model without experts says nothing about them; the tensors do.
        assert check_structure(saved(**changes), args, FOLDER) is None
        return
    with pytest.raises(UserError, match="the checkpoint is of another model") as caught:
        check_structure(saved(**changes), args, FOLDER)
    assert said in str(caught.value) and str(FOLDER) in str(caught.value)


def test_noop_layers_do_not_count() -> None:
    args = arguments("--num-layers 6 --noop-layers 0,5")
    assert check_structure(saved(), args, FOLDER) is None
    with pytest.raises(UserError, match="--noop-layers 0,5 instead of none"):
        check_topology(saved(), args, FOLDER)
    # Upstream's converter counts them, and does not write down which they are.
    unsaid = saved(num_layers=6)
    del unsaid["noop_layers"]
    assert check_structure(unsaid, args, FOLDER) is None
    check_topology(unsaid, args, FOLDER)
    for written in ("0,5", [0, 5], {0, 5}, (0, 5)):
        check_topology(saved(num_layers=6, noop_layers=written), args, FOLDER)


def test_what_changes_the_function() -> None:
    line = check_structure(saved(rotary_base=500000, norm_epsilon=1e-6), arguments(), FOLDER)
    assert line == (
        "flags that differ from those of the checkpoint: --rotary-base 10000 instead of 500000, --norm-epsilon 1e-05 "
        "instead of 1e-06"
    )


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--seq-length 16", "--seq-length 16 instead of 32"),
        ("--seed 5", "--seed 5 instead of 1234"),
    ],
)
def test_other_samples_are_reported(flags: str, said: str) -> None:
    notice = check_structure(saved(), arguments(flags), FOLDER)
    assert notice is not None
    assert notice.startswith(
        f"the samples are not those of the checkpoint ({said}): the run goes on at the same number"
    )
    assert check_structure(saved(), arguments(f"{flags} --finetune --load x"), FOLDER) is None


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ({"no_shuffle": False}, {"no_shuffle": True}, "--no-shuffle on instead of off"),
        ({"prompt_type": None}, {"prompt_type": "qwen3"}, "--prompt-type qwen3 instead of none"),
        ({"pack": True}, {"pack": False}, "--pack off instead of on"),
        # With padded samples data are filled up to whole global batches.
        (
            {"padded_samples": True, "global_batch_size": 8},
            {"padded_samples": True, "global_batch_size": 4},
            "--global-batch-size 4 instead of 8",
        ),
        ({"global_batch_size": 8}, {"global_batch_size": 4}, None),
    ],
)
def test_other_samples_of_conversations(before: dict[str, Any], now: dict[str, Any], said: str | None) -> None:
    notice = check_structure(saved(**before), Namespace(**arguments().__dict__ | now), FOLDER)
    assert notice is None if said is None else notice is not None and f"({said})" in notice


def test_lists_of_data_are_compared_as_lists() -> None:
    args = arguments().__dict__ | {"data_path": ("0.3", "a"), "mock_data": False}
    notice = check_structure(saved(data_path=["0.3", "b"], mock_data=False), Namespace(**args), FOLDER)
    assert notice is not None and "(--data-path 0.3,a instead of 0.3,b)" in notice
    assert check_structure(saved(data_path=["0.3", "a"], mock_data=False), Namespace(**args), FOLDER) is None


def test_rank_files_with_another_padding_of_the_vocabulary() -> None:
    with pytest.raises(UserError, match="--padded-vocab-size 512 instead of 509"):
        check_topology(saved(padded_vocab_size=509), arguments(), FOLDER)
