"""What the flags take from a checkpoint, leave out, or refuse."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.training.checkpointing.conftest import Workplace

pytestmark = pytest.mark.distributed
DROPOUT = ["--hidden-dropout", "0.1"]
FORMATS = ("torch", "torch_dist")


@pytest.fixture(scope="module")
def saved(place: Workplace, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run of four steps that saved after two and three, in each format."""
    found: dict[str, Any] = {}
    for kind in FORMATS:
        folder = tmp_path_factory.mktemp(kind)
        saves = [(2, kind, folder), (3, kind, folder)]
        (found[f"{kind} run"],) = place.train("llama", 1, DROPOUT, steps=4, save=folder, saves=saves)
        found[kind] = folder
    return found


@pytest.mark.parametrize("kind", FORMATS)
def test_finetune_takes_weights_alone(place: Workplace, saved: dict[str, Any], kind: str) -> None:
    (run,) = place.train("llama", 1, [*DROPOUT, "--finetune"], steps=0, load=saved[kind])
    assert (run["error"], run["start"]) == (None, 0)
    assert run["state"].consumed_train_samples == 0
    (at_3,) = place.train("llama", 1, DROPOUT, steps=3, load=saved[kind])
    assert run["weights"] == at_3["weights"] and run["draws"] != at_3["draws"]
    (other,) = place.train(
        "llama", 1, [*DROPOUT, "--finetune", "--lr", "0.5", "--min-lr", "0.1"], steps=1, load=saved[kind]
    )
    assert other["error"] is None and other["steps"][0][0] == 1


@pytest.mark.parametrize("kind", FORMATS)
def test_states_are_left_out(place: Workplace, saved: dict[str, Any], kind: str) -> None:
    run = saved[f"{kind} run"]
    (resumed,) = place.train("llama", 1, DROPOUT, steps=4, load=saved[kind])
    assert resumed["steps"] == run["steps"][3:]
    (no_rng,) = place.train("llama", 1, [*DROPOUT, "--no-load-rng"], steps=4, load=saved[kind])
    assert no_rng["steps"][0][1] != run["steps"][3][1] and no_rng["steps"][0][3] == run["steps"][3][3]
    # Another optimizer would be refused if it were loaded; the learning rate goes on.
    flags = [*DROPOUT, "--no-load-optim", "--optimizer", "sgd"]
    (no_optim,) = place.train("llama", 1, flags, steps=4, load=saved[kind])
    assert no_optim["error"] is None
    assert no_optim["steps"][0] == run["steps"][3] and no_optim["weights"] != run["weights"]


@pytest.mark.parametrize("kind", FORMATS)
def test_what_was_not_saved_is_asked_for(place: Workplace, tmp_path: Path, kind: str) -> None:
    place.train("llama", 1, ["--no-save-optim", "--no-save-rng"], steps=2, save=tmp_path, saves=[(2, kind, tmp_path)])
    for flags, said in (
        ([], "not the optimizer's state and the state of random numbers; give --no-load-optim and --no-load-rng"),
        (["--no-load-rng"], "not the optimizer's state; give --no-load-optim"),
        (["--no-load-optim"], "not the state of random numbers; give --no-load-rng"),
    ):
        (run,) = place.train("llama", 1, flags, steps=3, load=tmp_path)
        assert said in run["error"] and run["error"].startswith("UserError"), run["error"]
    (run,) = place.train("llama", 1, ["--no-load-optim", "--no-load-rng"], steps=3, load=tmp_path)
    assert (run["error"], run["start"]) == (None, 2)


def test_a_step_is_named(place: Workplace, saved: dict[str, Any]) -> None:
    (run,) = place.train("llama", 1, [*DROPOUT, "--ckpt-step", "2"], steps=4, load=saved["torch"])
    assert run["steps"] == saved["torch run"]["steps"][2:]
    (run,) = place.train("llama", 1, [*DROPOUT, "--ckpt-step", "4"], steps=4, load=saved["torch"])
    assert run["error"] == (f"UserError: --ckpt-step 4: {saved['torch']} has no iter_0000004; there are: 2, 3")


def test_a_missing_checkpoint(place: Workplace, tmp_path: Path) -> None:
    for folder in (tmp_path / "nowhere", tmp_path):
        own = ["--save", str(folder)]
        (run,) = place.train("llama", 1, own, steps=1, load=folder)
        assert (run["error"], run["start"]) == (None, 0)
        assert any(f"--load {folder} holds no checkpoint" in line for line in run["log"])
        for flags in ([*own, "--exit-on-missing-checkpoint"], ["--save", str(tmp_path / "other")], []):
            (run,) = place.train("llama", 1, flags, steps=1, load=folder)
            assert run["error"].startswith(f"UserError: --load {folder} holds no checkpoint; correct the path")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--lr", "2e-3"], "--lr: 0.002 instead of 0.001"),
        (["--train-iters", "12"], "--lr-decay-iters or --train-iters: 12 instead of 10 steps"),
        (["--lr-warmup-iters", "2"], "--lr-warmup-iters or --lr-warmup-fraction: 2 instead of 3 steps"),
        (["--lr-decay-style", "linear"], "--lr-decay-style: linear instead of cosine"),
        (["--weight-decay", "0.2"], "--start-weight-decay or --weight-decay: 0.2 instead of 0.01"),
        (["--bf16"], "another kind (FP32Optimizer, expected Float16OptimizerWithFloat16Params)"),
        (["--use-distributed-optimizer"], "another kind (FP32Optimizer, expected DistributedOptimizer)"),
        (["--optimizer", "sgd"], "momentum"),
    ],
)
def test_another_optimizer_or_schedule(
    place: Workplace, saved: dict[str, Any], kind: str, flags: list[str], said: str
) -> None:
    (run,) = place.train("llama", 1, [*DROPOUT, *flags], steps=4, load=saved[kind])
    if kind == "torch_dist" and "distributed" in flags[0]:
        assert run["error"] is None
        return
    if kind == "torch_dist" and flags == ["--bf16"]:
        said = "belongs to another model or optimizer: 9 tensors are not in it (optimizer.state.fp32_param."
    assert said in run["error"], run["error"]


def test_the_schedule_of_the_run_or_of_the_checkpoint(place: Workplace, saved: dict[str, Any]) -> None:
    other = ["--lr", "2e-3", "--lr-decay-style", "linear", "--train-iters", "12"]
    (own,) = place.train("llama", 1, [*other, "--override-opt_param-scheduler"], steps=4, load=saved["torch"])
    (fresh,) = place.train("llama", 1, other, steps=4)
    assert own["steps"][0][3] == fresh["steps"][3][3]
    (its,) = place.train("llama", 1, [*other, "--use-checkpoint-opt_param-scheduler"], steps=4, load=saved["torch"])
    assert its["steps"][0][3] == saved["torch run"]["steps"][3][3]
    # The betas are the run's, whatever the checkpoint's groups of parameters say.
    (first,) = place.train("llama", 1, [*DROPOUT, "--adam-beta1", "0.5"], steps=4, load=saved["torch"])
    assert first["steps"] == saved["torch run"]["steps"][3:] and first["weights"] != saved["torch run"]["weights"]


def test_a_constant_schedule_may_be_prolonged(place: Workplace, tmp_path: Path) -> None:
    constant = ["--lr-decay-style", "constant", "--min-lr", "1e-3"]
    place.train("llama", 1, constant, steps=1, save=tmp_path, saves=[(1, "torch", tmp_path)])
    (run,) = place.train("llama", 1, [*constant, "--train-iters", "50"], steps=2, load=tmp_path)
    assert run["error"] is None and run["start"] == 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(
    ("toy", "said"),
    [
        ("llama_odd3", "--hidden-size 54 instead of 48, --num-attention-heads 9 instead of 6, --num-query-groups 3"),
        ("llama_tied", "--untie-embeddings-and-output-weights off instead of on"),
        ("qwen3", "--qk-layernorm on instead of off"),
    ],
)
def test_another_model(place: Workplace, saved: dict[str, Any], kind: str, toy: str, said: str) -> None:
    (run,) = place.train(toy, 1, [], steps=4, load=saved[kind])
    assert run["error"].startswith(f"UserError: --load {saved[kind]}/iter_0000003: the checkpoint is of another model")
    assert said in run["error"], run["error"]


def test_what_changes_the_function_is_said(place: Workplace, saved: dict[str, Any]) -> None:
    (run,) = place.train("llama", 1, DROPOUT, steps=3, load=saved["torch"], values={"rotary_base": 500.0})
    assert run["error"] is None
    assert "flags that differ from those of the checkpoint: --rotary-base 500 instead of 10000" in run["log"]


@pytest.mark.parametrize("kind", FORMATS)
def test_lines_of_training_are_kept_apart(place: Workplace, saved: dict[str, Any], tmp_path: Path, kind: str) -> None:
    """A run that goes back and saves again, and one that starts anew in the same folder."""
    folder = Path(shutil.copytree(saved[kind], tmp_path / "run"))
    back = [*DROPOUT, "--ckpt-step", "2"]
    (run,) = place.train("llama", 1, back, steps=4, load=folder, save=folder, saves=[(4, kind, folder)])
    assert run["error"] is None
    assert sorted(path.name for path in folder.glob("iter_*")) == ["iter_0000002", "iter_0000004"]
    assert (folder / "set_aside.1" / "iter_0000003").is_dir()
    assert any("iter_0000003" in line and "set_aside.1" in line for line in run["log"])
    (run,) = place.train("llama", 1, DROPOUT, steps=1, save=folder, saves=[(1, kind, folder)])
    assert sorted(path.name for path in folder.glob("iter_*")) == ["iter_0000001"]
    assert sorted(path.name for path in folder.glob("set_aside.2/*")) == ["iter_0000002", "iter_0000004"]
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == "1"
    # What was set aside is whole.
    (run,) = place.train("llama", 1, [*DROPOUT, "--ckpt-step", "4"], steps=4, load=folder / "set_aside.2")
    assert (run["error"], run["start"]) == (None, 4)


def test_a_run_that_loads_elsewhere_keeps_that_folder(place: Workplace, saved: dict[str, Any], tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in saved["torch"].rglob("*")}
    (run,) = place.train(
        "llama",
        1,
        DROPOUT,
        steps=5,
        load=saved["torch"],
        save=tmp_path,
        saves=[(4, "torch", tmp_path), (5, "torch", tmp_path)],
    )
    assert run["error"] is None
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000004", "iter_0000005"]
    assert {path: path.stat().st_mtime_ns for path in saved["torch"].rglob("*")} == before
    assert not list(tmp_path.glob("set_aside*"))
