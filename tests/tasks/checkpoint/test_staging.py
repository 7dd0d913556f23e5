"""An output is there as a whole or not at all: kills, Ctrl-C, two at once, and replacing an earlier one."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.checkpoint import convert, fill, staging
from mindspeed_llm.tasks.checkpoint.report import REPORT
from mindspeed_llm.tasks.checkpoint.staging import Staging
from tests.tasks.checkpoint import toys
from tests.tasks.checkpoint.test_convert import expect_same_hf, expect_same_mg
from tests.tasks.checkpoint.test_layout import PP, TP

TRACKER = "latest_checkpointed_iteration.txt"


def expect_unloadable(folder: Path, kind: str) -> None:
    """Nothing takes the folder for a checkpoint."""
    with pytest.raises(UserError, match=r"is missing|has no"):
        toys.run(folder, folder.with_name("never"), "--model-type-hf", "qwen3", of=kind, to="mg")


# Replacing


def test_overwriting(tmp_path: Path) -> None:
    """The earlier conversion goes with all of its files, and nothing else does."""
    source = toys.toy(tmp_path / "hf", "qwen3")
    output = tmp_path / "mg"
    toys.run(source, output, TP, "2", PP, "2")
    (output / "notes.md").write_text("mine")
    with pytest.raises(UserError, match="or give --overwrite to replace an earlier conversion"):
        toys.run(source, output)
    toys.run(source, output, "--overwrite")
    assert (output / "notes.md").read_text() == "mine"
    toys.run(source, tmp_path / "fresh", "--overwrite")
    expect_same_mg(tmp_path / "fresh", output)
    assert not list(output.glob("iter_0000001/mp_rank_0*_*")) and not list(tmp_path.glob("*.partial"))


def test_overwriting_a_hugging_face_directory(tmp_path: Path) -> None:
    source = toys.toy(tmp_path / "hf", "qwen3")
    toys.run(source, tmp_path / "mg", TP, "2")
    output = tmp_path / "back"
    toys.run(tmp_path / "mg", output, "--max-shard-size", "60KB", of="mg", to="hf")
    toys.run(tmp_path / "mg", output, "--overwrite", of="mg", to="hf")
    assert sorted(path.name for path in output.iterdir()) == ["config.json", REPORT, "model.safetensors"]
    expect_same_hf(source, output)


@pytest.mark.parametrize("what", ["trained", "continued", "no report"])
def test_what_no_conversion_wrote_is_left_alone(what: str, tmp_path: Path) -> None:
    source = toys.toy(tmp_path / "hf", "qwen3")
    output = tmp_path / "mg"
    toys.run(source, output)
    rank_file = output / "iter_0000001" / "mp_rank_00" / "model_optim_rng.pt"
    if what == "trained":
        (output / "iter_0000500" / "mp_rank_00").mkdir(parents=True)
        (output / "iter_0000500" / "mp_rank_00" / "model_optim_rng.pt").write_text("weights of weeks")
    elif what == "continued":
        with rank_file.open("ab") as file:
            file.write(b"an optimizer")
    else:
        (output / REPORT).unlink()
    before = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match="--overwrite leaves it alone"):
        toys.run(source, output, "--overwrite")
    assert {path: path.read_bytes() for path in output.rglob("*") if path.is_file()} == before


def files_of(folder: Path) -> dict[Path, bytes]:
    """All files, those behind symlinks included."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("verify", ["sample", "full"])
@pytest.mark.parametrize("name", ["iter_0000001/mp_rank_00/model_optim_rng.pt", TRACKER])
def test_a_file_that_changed_at_its_size_is_left_alone(verify: str, name: str, tmp_path: Path) -> None:
    """One bit, and the time of change put back: only the content tells."""
    source = toys.toy(tmp_path / "hf", "qwen3")
    output = tmp_path / "mg"
    toys.run(source, output, "--verify", verify)
    status, content = (output / name).stat(), bytearray((output / name).read_bytes())
    content[len(content) // 2] ^= 1
    (output / name).write_bytes(content)
    os.utime(output / name, ns=(status.st_atime_ns, status.st_mtime_ns))
    before = files_of(output)
    with pytest.raises(UserError, match=f"holds {name}, which is not as a conversion left it"):
        toys.run(source, output, "--overwrite")
    assert files_of(output) == before and not list(tmp_path.glob("mg.*"))


def test_what_stands_beside_the_weights_is_left_alone_where_it_changed(tmp_path: Path) -> None:
    """A configuration that was edited, which no weights tell; of another size."""
    source = toys.toy(tmp_path / "hf", "qwen3")
    toys.run(source, tmp_path / "mg")
    toys.run(tmp_path / "mg", output := tmp_path / "back", of="mg", to="hf")
    (output / "config.json").write_text((output / "config.json").read_text() + "\n")
    before = files_of(output)
    with pytest.raises(UserError, match=r"holds config\.json, which is not as a conversion left it"):
        toys.run(tmp_path / "mg", output, "--overwrite", of="mg", to="hf")
    assert files_of(output) == before


def test_what_links_lead_to_is_left_alone(tmp_path: Path) -> None:
    source = toys.toy(tmp_path / "hf", "qwen3")
    output = tmp_path / "mg"
    toys.run(source, output)
    (output / "iter_0000001").rename(tmp_path / "elsewhere")
    (output / "iter_0000001").symlink_to(tmp_path / "elsewhere")
    before = files_of(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="--overwrite leaves it alone"):
        toys.run(source, output, "--overwrite")
    assert files_of(tmp_path / "elsewhere") == before


@pytest.mark.parametrize("what", ["trained", "rewritten"])
def test_what_comes_while_it_runs_is_left_alone(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training run that saves into the folder meanwhile, beside the conversion or in its place."""
    source = toys.toy(tmp_path / "hf", "qwen3")
    output = tmp_path / "mg"
    toys.run(source, output)
    name = "iter_0000500" if what == "trained" else "iter_0000001"
    original, trained = convert.write_text, output / name / "mp_rank_00" / "model_optim_rng.pt"

    def meanwhile(path: Path, text: str) -> None:
        trained.parent.mkdir(parents=True, exist_ok=True)
        trained.write_text("weights of weeks")
        original(path, text)

    monkeypatch.setattr(convert, "write_text", meanwhile)
    with pytest.raises(UserError, match="--overwrite leaves it alone"):
        toys.run(source, output, "--overwrite")
    assert trained.read_text() == "weights of weeks" and (output / TRACKER).exists()


def test_files_of_the_user_are_not_replaced(tmp_path: Path) -> None:
    """Nor are they where they have the name of one that is written; one with the same content is no loss."""
    source = toys.toy(tmp_path / "hf", "qwen3")
    (source / "tokenizer.json").write_text('{"of": "the model"}')
    toys.run(source, tmp_path / "mg")
    output = tmp_path / "back"
    output.mkdir()
    (output / "tokenizer.json").write_text('{"of": "mine"}')
    flags = ("--hf-cfg-dir", str(source))
    for overwrite in ((), ("--overwrite",)):
        with pytest.raises(UserError, match=r"holds tokenizer\.json, which this conversion would replace"):
            toys.run(tmp_path / "mg", output, *flags, *overwrite, of="mg", to="hf")
        assert {path.name: content for path, content in files_of(output).items()} == {
            "tokenizer.json": b'{"of": "mine"}'
        }
    (output / "tokenizer.json").write_text('{"of": "the model"}')
    toys.run(tmp_path / "mg", output, *flags, of="mg", to="hf")
    expect_same_hf(source, output)


def test_failure_leaves_the_earlier_conversion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = toys.toy(tmp_path / "hf", "qwen3")
    toys.run(source, tmp_path / "mg", TP, "2")
    toys.run(source, tmp_path / "same", TP, "2")
    monkeypatch.setattr(convert, "verify", lambda *args, **kwargs: (_ for _ in ()).throw(UserError("it differs")))
    with pytest.raises(UserError, match="it differs"):
        toys.run(source, tmp_path / "mg", "--overwrite")
    expect_same_mg(tmp_path / "same", tmp_path / "mg")


def test_a_kill_while_replacing_leaves_no_mixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = toys.toy(tmp_path / "hf", "qwen3")
    toys.run(source, tmp_path / "mg", TP, "2")

    class Killed(BaseException):
        pass

    def killed(path: Path, to: Path) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(staging.os, "replace", killed)
        patched.setattr(Staging, "_remove", lambda self: self._lock.release())
        with pytest.raises(Killed):
            toys.run(source, tmp_path / "mg", "--overwrite")
    expect_unloadable(tmp_path / "mg", "mg")
    expect_unloadable(tmp_path / "mg.partial", "mg")
    toys.run(source, tmp_path / "mg", "--overwrite")
    toys.run(tmp_path / "mg", tmp_path / "back", of="mg", to="hf")
    expect_same_hf(source, tmp_path / "back")


def test_source_and_output_in_one_folder(tmp_path: Path) -> None:
    source = toys.toy(tmp_path / "hf", "qwen3")
    (tmp_path / "link").symlink_to(source)
    with pytest.raises(UserError, match="is --load-dir; choose another folder"):
        toys.run(source, tmp_path / "link", "--overwrite")


# Two at once, and places where nothing can be written


def test_two_at_once(tmp_path: Path) -> None:
    source = toys.toy(tmp_path / "hf", "qwen3")
    with Staging(tmp_path / "mg", nbytes=0) as other:
        (other.folder / "half").write_text("of its output")
        with pytest.raises(UserError, match="is being written by another conversion"):
            toys.run(source, tmp_path / "mg")
        assert (other.folder / "half").exists()
    toys.run(source, tmp_path / "mg")


@pytest.mark.parametrize("name", ["mg.partial", "mg.partial.lock"])
@pytest.mark.parametrize("kind", ["folder", "file", "link to a folder", "link to a file", "link to nothing"])
def test_names_beside_the_output_that_somebody_has(name: str, kind: str, tmp_path: Path) -> None:
    """They are refused, and nothing in them or behind them changes."""
    source = toys.toy(tmp_path / "hf", "qwen3")
    mine = tmp_path / "precious" if "link" in kind else tmp_path / name
    if "folder" in kind:
        (mine / "chapters").mkdir(parents=True)
        (mine / "chapters" / "thesis.txt").write_text("years")
    elif kind != "link to nothing":
        mine.write_text("years")
    if "link" in kind:
        (tmp_path / name).symlink_to(mine)
    before, names = files_of(tmp_path), sorted(tmp_path.rglob("*"))
    for flags in ((), ("--overwrite",)):
        with pytest.raises(UserError, match=rf"{tmp_path / name}.*, which is there already and"):
            toys.run(source, tmp_path / "mg", *flags)
        assert files_of(tmp_path) == before and sorted(tmp_path.rglob("*")) == names


def test_what_a_kill_leaves_is_removed_at_any_moment(tmp_path: Path) -> None:
    """Just after making the folder, in the middle of writing, and in the middle of removing; but not what is behind a
    link in it.
    """
    source = toys.toy(tmp_path / "hf", "qwen3")
    partial, precious = tmp_path / "mg.partial", tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years")
    partial.mkdir()
    toys.run(source, tmp_path / "mg")
    toys.run(source, tmp_path / "expected")
    with Staging(tmp_path / "other", nbytes=0) as killed:
        (killed.folder / "half").mkdir()
        (killed.folder / "half" / "model.pt").write_text("half")
        (killed.folder / "link").symlink_to(precious)
        killed.folder.rename(partial)
    toys.run(source, tmp_path / "mg", "--overwrite")
    expect_same_mg(tmp_path / "expected", tmp_path / "mg")
    assert (precious / "thesis.txt").read_text() == "years" and not list(tmp_path.glob("mg.*"))


def test_places_where_nothing_can_be_written(tmp_path: Path) -> None:
    source = toys.toy(tmp_path / "hf", "qwen3")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file; expected a folder"):
        toys.run(source, tmp_path / "file")
    with pytest.raises(UserError, match=r"cannot be made there \(Not a directory"):
        toys.run(source, tmp_path / "file" / "mg")


def test_a_link_to_the_output_stays_one(tmp_path: Path) -> None:
    source = toys.toy(tmp_path / "hf", "qwen3")
    (tmp_path / "disk").mkdir()
    (tmp_path / "mg").symlink_to(tmp_path / "disk")
    toys.run(source, tmp_path / "mg")
    assert (tmp_path / "mg").is_symlink() and (tmp_path / "disk" / TRACKER).exists()


# Ends before its time


@pytest.mark.parametrize("to", ["mg", "hf"])
def test_unloadable_until_the_end(to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when all is written, but not on the disk yet."""
    source, of = toys.toy(tmp_path / "hf", "qwen3"), "hf"
    if to == "hf":
        toys.run(source, tmp_path / "from", PP, "2")
        source, of = tmp_path / "from", "mg"
    original = convert.write_text

    def at_the_end(path: Path, text: str) -> None:
        if path.name == REPORT:
            assert list(path.parent.rglob("*.pt" if to == "mg" else "*.safetensors"))
            expect_unloadable(path.parent, to)
        original(path, text)

    monkeypatch.setattr(convert, "write_text", at_the_end)
    toys.run(source, tmp_path / "out", of=of, to=to)
    assert (tmp_path / "out" / REPORT).exists() and not (tmp_path / "never").exists()


def test_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends the threads and removes what they wrote."""
    source = toys.toy(tmp_path / "hf", "qwen3")
    original, calls = fill.write_slab, []

    def interrupted(*args):
        calls.append(1)
        if len(calls) == 5:
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.02)
        return original(*args)

    monkeypatch.setattr(fill, "write_slab", interrupted)
    with pytest.raises(KeyboardInterrupt):
        toys.run(source, tmp_path / "mg")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"] and len(calls) < 20


def _slowly(source: str, output: str) -> None:
    original = fill.write_slab

    def slow(*args):
        time.sleep(0.01)
        return original(*args)

    fill.write_slab = slow
    toys.run(Path(source), Path(output), TP, "2", PP, "2", "--overwrite")


def test_kills(tmp_path: Path) -> None:
    """A process that is killed at any moment leaves no output; the next one cleans up after it."""
    source = toys.toy(tmp_path / "hf", "qwen3")
    partial, chance = tmp_path / "mg.partial", random.Random(0)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    for number in range(6):
        process = context.Process(target=_slowly, args=(str(source), str(tmp_path / "mg")))
        process.start()
        deadline = time.monotonic() + 120
        while not list(partial.rglob("*.pt")):
            assert process.is_alive() and time.monotonic() < deadline
            time.sleep(0.001)
        # The whole of it takes some 0.6 s.
        time.sleep(chance.uniform(0, 0.5))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        if not (tmp_path / "mg").exists():
            expect_unloadable(partial, "mg")
        else:
            assert number and not partial.exists()
    toys.run(source, tmp_path / "mg", "--overwrite")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "mg"]
    toys.run(tmp_path / "mg", tmp_path / "back", of="mg", to="hf")
    expect_same_hf(source, tmp_path / "back")
