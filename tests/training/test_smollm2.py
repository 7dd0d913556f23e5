"""The comparison of both backends that `scripts/soak.sh mcore_smollm2` makes with SmolLM2-135M, on a toy with as many
heads.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.pool import RankPool, RowFailed
from tests.support.runs import save_model
from tests.training import smollm2

pytestmark = pytest.mark.distributed
ROWS = {"pretrain_gpt.py": "tests.training.command_rows:pretrain", "train_fsdp2.py": "tests.distributed.runs:train"}


def test_both_backends_on_text(rank_pool: RankPool, tmp_path: Path) -> None:
    data = tmp_path / "text.jsonl"
    texts = [f"{number} {word} make {number * 17}. " * 3 for number in range(20) for word in ("bricks", "stones")]
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    model = save_model(tmp_path / "model", "llama_odd3")

    def launch(script: str, argv: Sequence[str]) -> tuple[int, str]:
        try:
            answers = rank_pool.run(ROWS[script], ranks=smollm2.RANKS, argv=list(argv))
        except RowFailed as failure:
            kinds = {kind for _, kind, _, _ in failure.errors}
            return (2 if kinds == {"UserError"} else 1), failure.errors[0][2]
        codes = [answer if isinstance(answer, int) else answer["code"] for answer in answers]
        return max(codes), ""

    lines = list(smollm2.compare(launch, model=model, data=data, out=tmp_path, steps=3, length=32))
    assert [line.split(":")[0] for line in lines] == ["TP2", "FSDP2", "PP2", "DP2", "step 1", "step 2", "step 3"]

    def other_order(script: str, argv: Sequence[str]) -> tuple[int, str]:
        """The fault that must be seen: the Megatron backend takes its samples in another order."""
        return launch(script, [*argv, "--seed", "43"] if script == "pretrain_gpt.py" else argv)

    with pytest.raises(AssertionError, match=r"the backends' losses differ by"):
        list(smollm2.compare(other_order, model=model, data=data, out=tmp_path, steps=1, length=32))
