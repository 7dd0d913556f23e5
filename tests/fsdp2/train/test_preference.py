"""Preference optimisation through FSDP equals a few lines of torch over transformers, for any split of the pairs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM

from mindspeed_llm.fsdp2.checkpoint.adapter_names import is_adapter
from tests.distributed.test_resume import ends
from tests.fsdp2.train.adapter_rows import peft_adapter
from tests.fsdp2.train.preference_rows import PairOfSides
from tests.support.pool import RankPool
from tests.support.reference import RECIPE, Trace, assert_parity, relative
from tests.support.runs import exported, metrics, save_model, write_config
from tests.support.toys import save_toy

pytestmark = pytest.mark.distributed
STEPS, PAIRS = 3, 4
BETA = 0.2
REWARDS = ("rewards_chosen", "rewards_rejected", "rewards_accuracy", "rewards_margin")


def make_pairs(count: int, *, seed: int = 0) -> list[PairOfSides]:
    """Two replies of different lengths to one prompt; in each some target is token 0."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(shortest: int, longest: int) -> list[int]:
        length = int(torch.randint(shortest, longest + 1, (1,), generator=generator))
        return torch.randint(3, 509, (length,), generator=generator).tolist()

    pairs = []
    for _ in range(count):
        prompt = numbers(4, 12)
        replies = [[*numbers(3, 9), 0, *numbers(2, 9)] for _ in range(2)]
        pairs.append(tuple((prompt + reply, [-100] * len(prompt) + reply) for reply in replies))
    return pairs


def split(pairs: list[PairOfSides], ranks: int) -> list[list[list[list[PairOfSides]]]]:
    """`plan[step][rank]`: 4 pairs a step, in micro batches of 2, 1 and 1 pairs; the second of two ranks has one that
    only fills up.
    """
    plan = []
    for step in range(STEPS):
        a, b, c, d = pairs[step * PAIRS : (step + 1) * PAIRS]
        plan.append([[[a, b], [c], [d]]] if ranks == 1 else [[[a, b], [c]], [[d], []]])
    return plan


def log_prob(model: Any, side: tuple[list[int], list[int]]) -> tuple[torch.Tensor, int]:
    ids, labels = side
    log_probs = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1].log_softmax(-1)
    targets = [(t, label) for t, label in enumerate(labels[1:]) if label != -100]
    return sum(log_probs[t, label] for t, label in targets), len(targets)  # type: ignore[return-value]


def reference_run(
    folder: Path,
    pairs: list[PairOfSides],
    *,
    kind: str,
    smoothing: float,
    ftx: float,
    adapter: str | None,
    ref_model: Path | None,
) -> tuple[Trace, list[dict[str, float]]]:
    """Pair by pair, without padding; the trace, and the rewards of each step."""
    policy: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    reference = AutoModelForCausalLM.from_pretrained(ref_model or folder, dtype=torch.float32)
    if adapter is not None:
        policy = PeftModel.from_pretrained(policy, adapter, is_trainable=True)
    policy.train()
    trained = {name: parameter for name, parameter in policy.named_parameters() if parameter.requires_grad}
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in trained.values() if p.ndim > 1], "weight_decay": RECIPE["weight_decay"]},
            {"params": [p for p in trained.values() if p.ndim <= 1], "weight_decay": 0.0},
        ],
        lr=RECIPE["lr"],
        betas=RECIPE["betas"],
        eps=RECIPE["eps"],
    )
    trace, rewards = Trace(), []
    for step in range(STEPS):
        total, sums = 0.0, torch.zeros(4)
        for chosen, rejected in pairs[step * PAIRS : (step + 1) * PAIRS]:
            (pc, lc), (pr, lr) = log_prob(policy, chosen), log_prob(policy, rejected)
            with torch.no_grad():
                (rc, _), (rr, _) = log_prob(reference, chosen), log_prob(reference, rejected)
            c, r = pc - rc, pr - rr
            if kind == "ipo":
                c, r = c / lc, r / lr
            h = c - r
            if kind == "sigmoid":
                loss = (1 - smoothing) * -torch.log(torch.sigmoid(BETA * h)) - smoothing * torch.log(
                    torch.sigmoid(-BETA * h)
                )
            else:
                loss = (1 - BETA * h).clamp(min=0) if kind == "hinge" else (h - 1 / (2 * BETA)) ** 2
            loss = (loss - ftx * pc / lc) / PAIRS
            loss.backward()
            total += loss.item()
            sums += torch.tensor([BETA * c.item(), BETA * r.item(), float(h > 0), BETA * h.item()]) / PAIRS
        norm = torch.nn.utils.clip_grad_norm_(trained.values(), RECIPE["clip"])
        optimizer.step()
        optimizer.zero_grad()
        trace.losses.append(total)
        trace.grad_norms.append(norm.item())
        rewards.append(dict(zip(REWARDS, sums.tolist(), strict=True)))
    if adapter is None:
        trace.weights = {name: tensor.detach().clone() for name, tensor in policy.state_dict().items()}
    else:
        trace.weights = {name.removeprefix("base_model.model."): p.detach().clone() for name, p in trained.items()}
    return trace, rewards


def run_rows(
    rank_pool: RankPool,
    tmp_path: Path,
    *,
    toy: str,
    kind: str,
    smoothing: float = 0.0,
    ftx: float = 0.0,
    ranks: int,
    has_adapter: bool = False,
    has_ref_model: bool = False,
    meta: bool = False,
    mutant: str | None = None,
) -> tuple[list[dict[str, Any]], Trace, list[dict[str, float]]]:
    """The rows of the run, and what `reference_run` gives."""
    folder = save_toy(toy, tmp_path / "model")
    adapter = peft_adapter(folder, tmp_path / "adapter", targets=["q_proj", "up_proj"]) if has_adapter else None
    ref_model = save_toy(toy, tmp_path / "reference", seed=1) if has_ref_model else None
    pairs = make_pairs(STEPS * PAIRS)
    sections = {
        "model": {"adapter_name_or_path": adapter, "init_model_with_meta_device": meta},
        "parallel": {"recompute": meta},
        "training": {
            "stage": "dpo",
            "dpo_loss_type": kind,
            "dpo_beta": BETA,
            "dpo_label_smoothing": smoothing,
            "pref_ftx": ftx,
            "ref_model": str(ref_model) if ref_model else None,
        },
    }
    rows = rank_pool.run(
        "tests.fsdp2.train.preference_rows:steps",
        ranks=ranks,
        folder=str(folder),
        plan=split(pairs, ranks),
        sections=sections,
        mutant=mutant,
    )
    expected = reference_run(
        folder, pairs, kind=kind, smoothing=smoothing, ftx=ftx, adapter=adapter, ref_model=ref_model
    )
    return rows, *expected


def found_trace(row: dict[str, Any]) -> Trace:
    weights = row["weights"]
    adapters = {name: tensor for name, tensor in weights.items() if is_adapter(name)}
    return Trace(
        losses=[result["loss"] for result in row["results"]],
        grad_norms=[result["grad_norm"] for result in row["results"]],
        weights=adapters or weights,
    )


CASES: list[dict[str, Any]] = [
    {"toy": "llama", "kind": "sigmoid", "ranks": 1},
    {"toy": "llama", "kind": "sigmoid", "ranks": 2, "smoothing": 0.1, "ftx": 0.5, "meta": True},
    {"toy": "llama_tied", "kind": "hinge", "ranks": 2},
    {"toy": "llama", "kind": "hinge", "ranks": 1, "ftx": 1.0, "has_ref_model": True},
    {"toy": "llama", "kind": "ipo", "ranks": 2, "has_ref_model": True},
    {"toy": "llama", "kind": "ipo", "ranks": 1, "has_adapter": True},
    {"toy": "llama", "kind": "sigmoid", "ranks": 2, "has_adapter": True, "meta": True},
    {"toy": "llama", "kind": "sigmoid", "ranks": 2, "has_adapter": True, "has_ref_model": True},
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_steps_equal_a_few_lines_of_torch(rank_pool: RankPool, tmp_path: Path, case: dict[str, Any]) -> None:
    rows, expected, rewards = run_rows(rank_pool, tmp_path, **case)
    assert_parity(found_trace(rows[0]), expected)
    for result, wanted in zip(rows[0]["results"], rewards, strict=True):
        assert result["targets"] == result["samples"] == PAIRS
        for name in REWARDS:
            assert result["metrics"][name] == pytest.approx(wanted[name], rel=1e-4, abs=2e-5), name
    first = rows[0]["results"][0]["metrics"]
    if not case.get("has_ref_model") and not case.get("has_adapter"):
        # Policy and reference are the same model: ties, which are no wins.
        assert first["rewards_margin"] == 0.0 and first["rewards_accuracy"] == 0.0
        source = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).state_dict()
        assert all(torch.equal(tensor, source[name]) for name, tensor in rows[0]["reference"].items())
    # The evaluation is of the pairs of the last step, after it: better by then.
    assert all(row["evaluated"] | {"seconds": 0} == rows[0]["evaluated"] | {"seconds": 0} for row in rows)
    assert rows[0]["evaluated"]["metrics"]["rewards_margin"] > rewards[-1]["rewards_margin"]


@pytest.mark.parametrize(
    ("mutant", "case"),
    [
        ("adapters_stay_on", {"has_adapter": True}),
        ("sides_swapped", {"has_ref_model": True}),
        ("token_0_has_no_probability", {"has_ref_model": True}),
        ("mean_of_means", {}),
    ],
)
def test_faults_are_found(rank_pool: RankPool, tmp_path: Path, mutant: str, case: dict[str, Any]) -> None:
    rows, expected, _ = run_rows(rank_pool, tmp_path, toy="llama", kind="sigmoid", ranks=1, mutant=mutant, **case)
    found = found_trace(rows[0])
    loss_off = any(relative(a, b) > 1e-3 for a, b in zip(found.losses, expected.losses, strict=True))
    norm_off = any(relative(a, b) > 1e-3 for a, b in zip(found.grad_norms, expected.grad_norms, strict=True))
    assert loss_off or norm_off


def dpo_config(place: Path, name: str, *, model: dict[str, Any] | None = None, **training: Any) -> str:
    """The YAML file of a run on pairs in which the chosen reply is of ones and the rejected one of twos."""
    if not (place / "model").exists():
        save_model(place / "model", "llama")
        rows = [
            {"instruction": str(173 * i % 1009), "chosen": "1" * (2 + i % 5), "rejected": "2" * (2 + i % 4)}
            for i in range(30)
        ]
        (place / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    data = {
        "dataset": {"file_name": str(place / "pairs.jsonl"), "ranking": True},
        "template": "empty",
        "cutoff_len": 32,
        "val_size": 6,
    }
    path = Path(write_config(place / name, place / "model", data, **{"stage": "dpo", "max_steps": 6, **training}))
    sections = yaml.safe_load(path.read_text())
    sections["model"] |= model or {}
    path.write_text(yaml.safe_dump(sections))
    return str(path)


def all_lines(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def test_the_margin_on_held_out_pairs_rises_and_a_resumed_run_is_the_same(rank_pool: RankPool, tmp_path: Path) -> None:
    row = "tests.distributed.runs:train"
    common = {"eval_steps": 3, "eval_on_start": True, "resume_from_checkpoint": "latest"}
    whole = rank_pool.run(row, ranks=2, argv=[dpo_config(tmp_path, "whole", **common)])
    assert ends(whole) == [(0, None)] * 2
    config = dpo_config(tmp_path, "parts", save_steps=1000, **common)
    assert ends(rank_pool.run(row, ranks=2, argv=[config], stop_at={0: 3})) == [(143, None)] * 2
    assert ends(rank_pool.run(row, ranks=2, argv=[config])) == [(0, None)] * 2
    # The reference of the resumed run is the model from before the first part.
    found, expected = all_lines(tmp_path / "parts"), all_lines(tmp_path / "whole")
    kept = [key for key in expected[1] if key.startswith("rewards")]
    assert sorted(kept) == sorted(REWARDS)
    steps = [[line for line in lines if "lm_loss" in line] for lines in (found, expected)]
    assert [[line[key] for key in (*kept, "lm_loss")] for line in steps[0]] == [
        [line[key] for key in (*kept, "lm_loss")] for line in steps[1]
    ]
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")
    weights = exported(tmp_path / "whole")
    assert all(torch.equal(tensor, weights[name]) for name, tensor in exported(tmp_path / "parts").items())
    first = steps[1][0]
    assert first["lm_loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert first["rewards_margin"] == first["rewards_accuracy"] == 0.0
    held_out = [line for line in expected if "eval_loss" in line]
    assert not any("eval_perplexity" in line for line in held_out)
    assert not any("perplexity" in line for line in whole[0]["log"])
    margins = [line["eval_rewards_margin"] for line in held_out]
    assert margins[0] == 0.0 and margins[0] < margins[1] < margins[2]
    assert any(" rewards margin: " in line for line in whole[0]["log"] if "iteration" in line)


def test_with_adapters_the_model_itself_is_the_reference(rank_pool: RankPool, tmp_path: Path) -> None:
    """No second model is built, and the first step compares the model with itself."""
    argv = [dpo_config(tmp_path, "run", model={"lora_rank": 2, "lora_dropout": 0.2}, lr=1e-2)]
    rows = rank_pool.run("tests.distributed.runs:train", ranks=2, argv=argv)
    assert ends(rows) == [(0, None)] * 2
    assert sum("attention: " in line for line in rows[0]["log"]) == 1  # said once for each model that is built
    lines = [line for line in all_lines(tmp_path / "run") if "lm_loss" in line]
    assert lines[0]["lm_loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert lines[0]["rewards_margin"] == 0.0
    assert lines[-1]["rewards_margin"] > 0.02
    assert (tmp_path / "run" / "adapter_model.safetensors").exists()


def test_records_that_are_no_pairs_are_refused(tmp_path: Path) -> None:
    from mindspeed_llm.errors import UserError
    from mindspeed_llm.fsdp2.config import parse_command_line
    from mindspeed_llm.fsdp2.data.validate import validate_data

    path = Path(dpo_config(tmp_path, "run"))
    sections = yaml.safe_load(path.read_text())
    del sections["data"]["dataset"]["ranking"]
    path.write_text(yaml.safe_dump(sections))
    with pytest.raises(UserError, match=r"data.dataset: training.stage = dpo needs pairs .* ranking: true"):
        validate_data(parse_command_line([str(path)]).config)
    sections["data"]["dataset"] |= {"ranking": True, "columns": {"chosen": "good"}}
    path.write_text(yaml.safe_dump(sections))
    with pytest.raises(UserError, match=r"no key .good. .the chosen column."):
        validate_data(parse_command_line([str(path)]).config)
