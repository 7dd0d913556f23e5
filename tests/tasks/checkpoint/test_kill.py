"""Conversions that end before their time: killed as real processes at random moments and at each step of publishing, or
by a disk that becomes full. Nothing is left that anything would load, and the next one succeeds.
"""

from __future__ import annotations

import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.checkpoint import convert, fill, hf_writer, mg_writer, staging
from mindspeed_llm.tasks.checkpoint import main as convert_command
from mindspeed_llm.tasks.checkpoint.main import _Ended
from mindspeed_llm.tasks.checkpoint.prepare import prepare
from mindspeed_llm.tasks.checkpoint.report import REPORT
from mindspeed_llm.tasks.checkpoint.staging import Staging
from tests.support.mounts import mounted
from tests.tasks.checkpoint import grid_toys, toys
from tests.tasks.checkpoint.test_layout import PP, TP

KILLS, SEED = 5, 0
DEADLINE_S = 180.0
FLAGS = (TP, "2", PP, "2", "--verify", "full", "--workers", "2")
# 100 MB: some tenths of a second between the first file and the last.
SIZES = {
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 2048,
    "vocab_size": 30000,
}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that takes long enough to be hit in the middle; its values are drawn."""
    folder = tmp_path_factory.mktemp("large") / "hf"
    config = toys.CONFIGS["qwen3"] | SIZES
    # Names by a tiny model of the same family.
    tiny = toys.toy(folder.parent / "tiny", "qwen3")
    sizes = {48: 512, 512: 30000, 88: 2048, 96: 512, 32: 256, 16: 64}
    names = {name: [sizes[size] for size in value.shape] for name, value in grid_toys.read(tiny).items()}
    draw = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randint(-(2**15), 2**15, shape, generator=draw, dtype=torch.int16).view(torch.bfloat16)
        for name, shape in names.items()
    }
    return toys.save_hf(folder, config, tensors)


def bytes_of(folder: Path) -> dict[str, bytes]:
    """All files but the report, which says how long it took."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != REPORT
    }


def loadable(folder: Path) -> bool:
    """Whether anything takes the folder for a checkpoint or a model."""
    for of in ("mg", "hf"):
        try:
            prepare(toys.request(folder, folder.with_name("never"), of=of))
        except UserError:
            continue
        return True
    return False


# Real processes, at random moments


class Command:
    """`convert_ckpt_v2.py` from one folder to another, as a process."""

    def __init__(self, repository: Path, load: Path, save: Path, to: str) -> None:
        flags = FLAGS if to == "mg" else ("--max-shard-size", "20MB", "--verify", "full", "--workers", "2")
        kinds = {"of": "hf" if to == "mg" else "mg", "to": to}
        self.save, self.partial = save, save.with_name(f"{save.name}.partial")
        self.here = partial(toys.run, load, save, *flags, **kinds)
        """The same in this process, which is faster."""
        self._line = [sys.executable, str(repository / "convert_ckpt_v2.py"), "--load-model-type", kinds["of"]]
        self._line += ["--save-model-type", to, "--load-dir", str(load), "--save-dir", str(save), *flags]

    def start(self) -> subprocess.Popen[bytes]:
        """Start it and wait for the first file that it writes."""
        process = subprocess.Popen(self._line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        deadline = time.monotonic() + DEADLINE_S
        while not self._has_begun():
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()[1].decode()
            time.sleep(0.0005)
        return process

    def _has_begun(self) -> bool:
        return any(path.suffix in (".pt", ".safetensors") for path in self.partial.rglob("*"))

    def finish(self) -> float:
        """Let it run to its end; the time from its first file to where all of them are published."""
        process = self.start()
        started = time.monotonic()
        while process.poll() is None and not self.save.exists():
            time.sleep(0.0005)
        span = time.monotonic() - started
        error = process.communicate(timeout=DEADLINE_S)[1]
        assert process.returncode == 0, error.decode()
        return span


def kill_conversions(repository: Path, source: Path, folder: Path, *, to: str, kills: int, seed: int) -> list[str]:
    """Kill conversions of `source` at random moments before they have published; returns what was found after each.

    Raises:
        AssertionError: something is left that would be loaded and is not whole, or the next run gives something else.
    """
    folder.mkdir()
    whole = Command(repository, source, folder / "whole", to)
    span = whole.finish()
    expected, chance, found = bytes_of(whole.save), random.Random(seed), []
    while found.count("nothing left") < kills:
        assert len(found) < 5 * kills, f"most kills came too late: {found}"
        command = Command(repository, source, folder / f"out{len(found)}", to)
        process = command.start()
        time.sleep(chance.uniform(0, span))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        if command.save.exists():
            # A machine that is busy at times: all was done already.
            span *= 0.7
            found.append("published")
        else:
            if loadable(command.partial):
                assert bytes_of(command.partial) == expected, f"{command.partial} is half a checkpoint"
            command.here()
            found.append("nothing left")
        assert bytes_of(command.save) == expected and not command.partial.exists(), f"after kill {len(found)}"
    return found


@pytest.mark.parametrize(("to", "kills"), [("mg", 3), ("hf", 2)])
def test_kills(
    to: str, kills: int, large: Path, repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = large
    if to == "hf":
        toys.run(large, tmp_path / "mg", *FLAGS)
        source = tmp_path / "mg"
    found = kill_conversions(repository, source, tmp_path / "killed", to=to, kills=kills, seed=SEED)
    with capsys.disabled():
        print(f" {kills} of {KILLS} kills, seed {SEED}: {', '.join(found)} ", end="")
    assert found.count("nothing left") == kills


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_an_end_that_is_asked_for_leaves_nothing(
    number: signal.Signals, large: Path, repository: Path, tmp_path: Path
) -> None:
    """Neither the folder nor the lock, also when it is asked for twice; the code is the one that shells give."""
    command = Command(repository, large, tmp_path / "out", "mg")
    process = command.start()
    process.send_signal(number)
    process.send_signal(number)
    error = process.communicate(timeout=DEADLINE_S)[1].decode()
    assert process.returncode == 128 + number and error.endswith(f"ended by {number.name}\n"), error
    assert "Traceback" not in error and not list(tmp_path.iterdir())


@pytest.mark.parametrize("end", [_Ended(143), KeyboardInterrupt()])
def test_an_end_within_torchs_writer_is_no_error(
    end: BaseException, large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says something of its half archive; without an end that is an error."""

    class Stream(io.BytesIO):
        def write(self, content: Any) -> int:
            if self.tell() > 0:
                raise end
            return super().write(content)

    def save(*_: object, **__: object) -> None:
        torch.save({"x": torch.zeros(100_000)}, Stream())

    monkeypatch.setattr(convert_command, "_convert", save)
    with pytest.raises(RuntimeError):
        save()
    argv = ["--load-model-type", "hf", "--save-model-type", "mg", "--load-dir", str(large), "--save-dir", str(tmp_path)]
    with pytest.raises(type(end)) as raised:
        convert_command.main([*argv, *FLAGS])
    assert raised.value is end


def test_a_closed_terminal_does_not_end_what_ignores_it(large: Path, repository: Path, tmp_path: Path) -> None:
    """As nohup starts it."""
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = Command(repository, large, tmp_path / "out", "mg").start()
    finally:
        signal.signal(signal.SIGHUP, previous)
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=DEADLINE_S) == 0, process.communicate()[1].decode()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# Each step of publishing


class Killed(BaseException):
    """Stands for a kill: nothing in the package catches it, and nothing cleans up after it."""


def killed_at(step: int, monkeypatch: pytest.MonkeyPatch, run: Callable[[], object]) -> bool:
    """Run, and end it before its `step`-th change of the file system from publishing on; whether it came to that."""
    calls: list[str] = []

    def counted(name: str, original: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            calls.append(name)
            if len(calls) > step:
                raise Killed
            return original(*args, **kwargs)

        return call

    original, remove = Staging.publish, Staging._remove

    def publish(self: Staging) -> None:
        with monkeypatch.context() as patched:
            for owner, name in ((os, "replace"), (os, "rename"), (Path, "unlink"), (Path, "rmdir")):
                patched.setattr(owner, name, counted(name, getattr(owner, name)))
            original(self)

    with monkeypatch.context() as patched:
        patched.setattr(Staging, "publish", publish)
        # All that the system does for a process that is killed.
        patched.setattr(Staging, "_remove", lambda self: self._lock.release() if len(calls) > step else remove(self))
        try:
            run()
        except Killed:
            return True
    return False


def _fresh(output: Path, source: Path, of: str, to: str) -> None:
    """There is no such folder."""


def _beside_others(output: Path, source: Path, of: str, to: str) -> None:
    """There are files of the user in it."""
    output.mkdir()
    (output / "notes.md").write_text("mine")


def _over_earlier(output: Path, source: Path, of: str, to: str) -> None:
    """There is an earlier conversion, of other flags."""
    toys.run(source, output, *(("--max-shard-size", "60KB") if to == "hf" else (TP, "2")), of=of, to=to)
    (output / "notes.md").write_text("mine")


@pytest.mark.parametrize("to", ["mg", "hf"])
@pytest.mark.parametrize("prepared", [_fresh, _beside_others, _over_earlier])
def test_kill_at_each_step_of_publishing(
    to: str, prepared: Callable[[Path, Path, str, str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is there is nothing, all of the earlier one or all of the new one, and the same command with --overwrite
    ends it.
    """
    source, of = toys.toy(tmp_path / "model", "qwen3"), "hf"
    if to == "hf":
        toys.run(source, tmp_path / "from", PP, "2")
        source, of = tmp_path / "from", "mg"
    toys.run(source, tmp_path / "new", of=of, to=to)
    new = bytes_of(tmp_path / "new")
    for step in range(100):
        output = tmp_path / f"{step}" / "out"
        output.parent.mkdir()
        prepared(output, source, of, to)
        mine = {"notes.md": b"mine"} if (output / "notes.md").exists() else {}
        earlier = bytes_of(output) if output.exists() else None

        def run(output: Path = output) -> object:
            return toys.run(source, output, "--overwrite", of=of, to=to)

        ended = not killed_at(step, monkeypatch, run)
        if loadable(output):
            assert bytes_of(output) in (earlier, new | mine)
        # The last steps before a folder gets its name are taken inside of it: whole it is then, too.
        if loadable(unfinished := output.with_name("out.partial")):
            assert bytes_of(unfinished) == new
        if not ended:
            run()
        assert bytes_of(output) == new | mine
        assert sorted(path.name for path in output.parent.iterdir()) == ["out"]
        if ended:
            break
    assert ended and step >= 2


# Full disks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", "size=80m") as disk:
        yield disk


def fill_up(disk: Path) -> None:
    """Take all space that is left, as another program would."""
    with (disk / "ballast").open("wb") as file:
        left = os.statvfs(disk)
        os.posix_fallocate(file.fileno(), 0, left.f_bavail * left.f_frsize)


MOMENTS = {
    # when: what is called then, how often before
    "while files are laid out": ("lay_out", 1),
    "while values are written": (fill, "write_slab", 3),
    "at the end of the values": (fill, "write_slab", -1),
    "when the rest is written": (staging, "write_text", 0),
    "at the report": (convert, "write_text", 0),
}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("to", ["mg", "hf"])
def test_a_disk_that_becomes_full(
    to: str, moment: str, small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is the disk's own. Nothing is left, and with room again the same command succeeds."""
    source, of = toys.toy(tmp_path / "hf", "qwen3", vocab_size=4000), "hf"
    flags = ("--max-shard-size", "200KB") if to == "hf" else (TP, "2", PP, "2")
    if to == "hf":
        toys.run(source, tmp_path / "from", PP, "2")
        source, of = tmp_path / "from", "mg"
    toys.run(source, tmp_path / "expected", *flags, of=of, to=to)
    owner, name, before = _place(MOMENTS[moment], to, source, flags, of, tmp_path / "counted", monkeypatch)
    original, calls = getattr(owner, name), []

    def call(*args: object, **kwargs: object) -> object:
        calls.append(name)
        if len(calls) == before + 1:
            fill_up(small_disk)
        return original(*args, **kwargs)

    output = small_disk / "out"
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, call)
        with pytest.raises(UserError, match=rf"{output}: writing failed \(No space left on device\); nothing was left"):
            toys.run(source, output, *flags, of=of, to=to)
    assert [path.name for path in small_disk.iterdir()] == ["ballast"]
    (small_disk / "ballast").unlink()
    toys.run(source, output, *flags, of=of, to=to)
    assert bytes_of(output) == bytes_of(tmp_path / "expected")
    assert [path.name for path in small_disk.iterdir()] == ["out"]


def _place(
    moment: tuple, to: str, source: Path, flags: tuple[str, ...], of: str, unused: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[object, str, int]:
    """Which function of which module, and after how many calls; -1 counts from the end."""
    if len(moment) == 2:
        return (mg_writer if to == "mg" else hf_writer), *moment
    owner, name, before = moment
    if owner is staging:
        # The tracker, or config.json.
        return (mg_writer if to == "mg" else hf_writer), "write_text", before
    if before < 0:
        calls, original = [], getattr(owner, name)
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, lambda *args: calls.append(1) or original(*args))
            toys.run(source, unused, *flags, of=of, to=to)
        before += len(calls)
    return owner, name, before


def test_a_disk_without_room_for_more_files(tmp_path: Path) -> None:
    """Bytes are free, and names are not."""
    source = toys.toy(tmp_path / "hf", "qwen3")
    with mounted(tmp_path / "disk", "size=200m", "nr_inodes=12") as disk:
        with pytest.raises(UserError, match=r"writing failed \(No space left on device\)"):
            toys.run(source, disk / "out", TP, "2", PP, "2")
        assert not list(disk.iterdir())
        toys.run(source, disk / "out")


def test_a_disk_that_is_too_small_is_refused_first(small_disk: Path, tmp_path: Path, large: Path) -> None:
    with pytest.raises(
        UserError, match=r"\d\d MB will be written and 67 MB must stay free, but only \d\d MB are free there"
    ):
        toys.run(large, small_disk / "out")
    assert not list(small_disk.iterdir())


def test_the_large_model_converts(large: Path, tmp_path: Path) -> None:
    """What is killed above is a conversion that is right."""
    toys.run(large, tmp_path / "mg", *FLAGS)
    toys.run(tmp_path / "mg", tmp_path / "back", "--verify", "full", of="mg", to="hf")
    before, after = grid_toys.read(large), grid_toys.read(tmp_path / "back")
    assert before.keys() == after.keys()
    assert all(torch.equal(value.view(torch.int16), after[name].view(torch.int16)) for name, value in before.items())
    assert json.loads((tmp_path / "back" / "config.json").read_text())["vocab_size"] == SIZES["vocab_size"]
