"""The comparisons of both backends that `scripts/soak.sh lora_smollm2` and `dpo_smollm2` make with SmolLM2-135M, on a
toy; and what they must see.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.pool import RankPool
from tests.support.toys import save_toy
from tests.tasks.posttrain.conversations import make_records, make_tokenizer, write_records
from tests.tasks.posttrain.smollm2 import JOBS, Curves, Files, chats, compare, run, save_adapter, short_records

ROWS = {"posttrain_gpt.py": "tests.tasks.posttrain.rows:finetune", "train_fsdp2.py": "tests.distributed.runs:train"}
SIZES = {"steps": 4, "batch": 2, "length": 96, "train": 6, "held_out": 4, "eval_interval": 2, "learning_rate": 2e-2}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Files]:
    """Those of a job: a toy with its tokenizer, an adapter, records cut into two files."""
    folder = tmp_path_factory.mktemp("smollm2")
    model = save_toy("llama_odd3", folder / "model")
    make_tokenizer().save_pretrained(model)
    adapter = save_adapter(model, folder / "adapter")

    def made(name: str) -> Files:
        records = make_records(SIZES["train"] + SIZES["held_out"])
        if name == "dpo":
            records = [
                {
                    "conversations": [{"from": "human", "value": record["instruction"]}],
                    "chosen": {"from": "gpt", "value": f"yes {record['output']}"},
                    "rejected": {"from": "gpt", "value": f"{record['output']} no"},
                }
                for record in records
            ]
        train, held_out = records[: SIZES["train"]], records[SIZES["train"] :]
        return Files(
            model=model,
            adapter=adapter,
            train=write_records(folder / f"{name}_train.jsonl", train),
            held_out=write_records(folder / f"{name}_held_out.jsonl", held_out),
        )

    return made


@pytest.mark.distributed
@pytest.mark.parametrize("name", list(JOBS))
def test_both_backends(rank_pool: RankPool, files: Callable[[str], Files], tmp_path: Path, name: str) -> None:
    job = replace(JOBS[name], **SIZES)

    def launch(scripts: Mapping[str, Sequence[str]]) -> dict[str, tuple[int, str]]:
        done = {}
        for script, argv in scripts.items():
            [answer] = rank_pool.run(ROWS[script], ranks=1, draw=True, argv=list(argv))
            done[script] = (answer, "") if isinstance(answer, int) else (answer["code"], answer["error"] or "")
        return done

    lines = list(run(job, files(name), tmp_path, launch))
    heads = [line.split(":")[0] for line in lines]
    steps = [f"step {step}" for step in range(1, 5)]
    evaluations = [f"held out, after step {step}" for step in (0, 2, 4)]
    assert heads == ["both runs", *steps, *evaluations, "pictures"], lines
    found = Curves.read(job, tmp_path / "megatron")
    assert len({round(step["lm_loss"], 4) for step in found.steps}) == 4
    assert all(Path(path).is_file() for path in lines[-1].removeprefix("pictures: ").split(", "))

    def other_order(scripts: Mapping[str, Sequence[str]]) -> dict[str, tuple[int, str]]:
        """The fault that must be seen: the Megatron backend takes its samples in another order."""
        script = "posttrain_gpt.py"
        return launch({script: [word for word in scripts[script] if word != "--no-shuffle"]})

    with pytest.raises(AssertionError, match=r"the backends' curves differ by"):
        list(run(job, files(name), tmp_path, other_order))


def curves(losses: Sequence[float], evaluations: Mapping[int, float]) -> Curves:
    return Curves(steps=[{"lm_loss": loss} for loss in losses], evaluations=dict(evaluations))


@pytest.mark.parametrize(
    ("name", "losses", "evaluations", "message"),
    [
        ("lora", [3.0, 2.0 * 1.0005, 1.0], {2: 2.0, 3: 1.0 * 1.0005}, None),
        ("lora", [3.0, 2.0 * 1.0011, 1.0], {2: 2.0, 3: 1.0}, "curves differ by 1.1e-03"),
        ("lora", [3.0, 2.0, 1.0], {2: 2.003, 3: 1.0}, "curves differ by 1.5e-03"),
        ("lora", [3.0, 2.0], {2: 2.0, 3: 1.0}, r"\(3, 2\)"),
        ("lora", [3.0, 2.0, 1.0], {3: 1.0}, r"\{3: 1.0\}"),
        ("dpo", [0.7, 0.6, 0.5], {2: 0.1, 3: 0.2}, None),
        ("dpo", [0.7, 0.6, 0.5], {2: 0.1, 3: 0.2006}, "curves differ by 1.2e-03"),
    ],
)
def test_curves_that_differ(name: str, losses: list[float], evaluations: dict[int, float], message: str | None) -> None:
    job = replace(JOBS[name], steps=3)
    expected = {
        "lora": curves([3.0, 2.0, 1.0], {0: 3.0, 2: 2.0, 3: 1.0}),
        "dpo": curves([0.7, 0.6, 0.5], {0: 0.0, 2: 0.1, 3: 0.2}),
    }[name]
    mine = curves(losses, evaluations)
    if message is None:
        assert len(list(compare(job, expected, mine))) == 6
    else:
        with pytest.raises(AssertionError, match=message):
            list(compare(job, expected, mine))


@pytest.mark.parametrize(("name", "last", "message"), [("lora", 3.1, "fallen"), ("dpo", -0.1, "risen")])
def test_nothing_learned(name: str, last: float, message: str) -> None:
    start = 3.0 if name == "lora" else 0.0
    fsdp2, megatron = curves([1.0], {0: start, 1: last}), curves([1.0], {1: last})
    with pytest.raises(AssertionError, match=f"should have {message}"):
        list(compare(replace(JOBS[name], steps=1), fsdp2, megatron))


def test_records_that_fit(tmp_path: Path) -> None:
    """By the longer side of a pair; too few of them are refused, and all fit with short enough replies."""
    job = replace(JOBS["dpo"], length=70, characters=None, train=1, held_out=1)
    texts = [("a", "b"), ("a", "b" * 60), ("c", "d")]
    records = [
        {
            "conversations": [{"from": "human", "value": "why"}],
            "chosen": {"from": "gpt", "value": chosen},
            "rejected": {"from": "gpt", "value": rejected},
        }
        for chosen, rejected in texts
    ]
    assert chats(job, records[0])[1] == [{"role": "user", "content": "why"}, {"role": "assistant", "content": "b"}]
    file = write_records(tmp_path / "pairs.jsonl", records)
    assert short_records(file, job, make_tokenizer()) == [records[0], records[2]]
    with pytest.raises(SystemExit, match="has 2 records of at most 70 tokens; 3 are needed"):
        short_records(file, replace(job, train=2), make_tokenizer())
    found = short_records(file, replace(job, characters=9, train=2), make_tokenizer())
    assert [record["rejected"]["value"] for record in found] == ["b", "b" * 9, "d"]
