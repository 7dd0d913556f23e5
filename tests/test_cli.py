"""How commands end: exit codes, one message for many ranks, tracebacks on demand. Ranks are faked by environment."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mindspeed_llm.cli import describe
from mindspeed_llm.errors import UserError

PROGRAM = """
import sys, time
from mindspeed_llm import cli
from mindspeed_llm.errors import UserError

cli.FOLLOWER_WAIT_S, cli.NEIGHBOUR_WAIT_S, cli.LOSER_WAIT_S = {wait}, {neighbour}, 0.2

def main(argv):
{body}

cli.run(main, sys.argv[1:])
"""
# Joins the ranks of the environment in a gloo group on a file, then goes on with the rest of the body.
JOIN = """
    import os, torch.distributed as dist
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method="file://" + argv[0], rank=rank, world_size=2)
    dist.barrier()
"""


def start(
    body: str,
    *argv: str,
    wait: float = 1.0,
    neighbour: float = 0.5,
    rank: int | None = None,
    world: int = 2,
    **environment: str,
) -> subprocess.Popen:
    """Start a process whose main function has `body` (lines indented by four spaces)."""
    inherited = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    inherited.pop("MINDSPEED_DEBUG", None)
    if rank is not None:
        inherited |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(body=body, wait=wait, neighbour=neighbour), *argv],
        env=inherited | environment,
        cwd=Path(__file__).parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a process."""
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


@pytest.mark.parametrize(
    ("body", "code", "err"),
    [
        ("    return None", 0, ""),
        ("    return 0", 0, ""),
        ("    return 5", 5, ""),
        ("    sys.exit(0)", 0, ""),
        ("    raise UserError('a.yaml, line 3: no')", 2, "error: a.yaml, line 3: no\n"),
        (
            "    raise RuntimeError('two\\nlines')",
            1,
            "rank 0: RuntimeError: two lines\n(set MINDSPEED_DEBUG=1 for the traceback)\n",
        ),
        ("    raise KeyError", 1, "rank 0: KeyError\n(set MINDSPEED_DEBUG=1 for the traceback)\n"),
        ("    raise KeyboardInterrupt", 130, "interrupted\n"),
    ],
)
def test_exit_code_and_message(body: str, code: int, err: str) -> None:
    assert finish(start(body)) == (code, "", err)


@pytest.mark.parametrize("error", ["UserError", "RuntimeError"])
@pytest.mark.parametrize("way", ["option", "environment"])
def test_debug_shows_the_traceback_and_the_message(error: str, way: str) -> None:
    body = f"    raise {error}('why')"
    process = start(body, "--debug") if way == "option" else start(body, MINDSPEED_DEBUG="1")
    code, _, err = finish(process)
    assert code == (2 if error == "UserError" else 1)
    assert "Traceback" in err
    assert err.splitlines()[-1] == ("error: why" if error == "UserError" else "rank 0: RuntimeError: why")


def test_rank_0_speaks_for_all_before_there_is_a_group() -> None:
    """torchrun ends the others once rank 0 has ended; here the test does."""
    body = "    raise UserError('wrong')"
    follower, leader = start(body, rank=1, wait=60), start(body, rank=0)
    assert finish(leader) == (2, "", "rank 0: error: wrong\n")
    assert follower.poll() is None
    follower.terminate()
    code, _, err = finish(follower)
    assert code != 0
    assert err == ""


def test_a_rank_that_fails_alone_speaks_after_the_wait() -> None:
    started = time.monotonic()
    assert finish(start("    raise UserError('mine')", rank=1, wait=1.0)) == (2, "", "rank 1: error: mine\n")
    assert time.monotonic() - started > 1.5  # its neighbours' share on top: LOCAL_RANK is 1


def test_the_first_rank_of_a_further_node_speaks_before_its_neighbours() -> None:
    body = "    raise UserError('mine')"
    first = start(body, rank=8, world=16, wait=0.5, neighbour=60, LOCAL_RANK="0")
    neighbour = start(body, rank=9, world=16, wait=0.5, neighbour=60, LOCAL_RANK="1")
    assert finish(first) == (2, "", "rank 8: error: mine\n")
    assert neighbour.poll() is None
    neighbour.terminate()
    assert finish(neighbour)[2] == ""


def test_a_world_of_one_does_not_wait() -> None:
    process = start("    raise UserError('mine')", rank=0, world=1, wait=60)
    assert finish(process) == (2, "", "rank 0: error: mine\n")


@pytest.mark.distributed
@pytest.mark.parametrize("first", [0, 1])
def test_within_a_group_the_first_failing_rank_speaks(tmp_path: Path, first: int) -> None:
    body = JOIN + (
        f"    if rank != {first}:\n"
        "        time.sleep(1.5)\n"
        "    raise RuntimeError(f'failure of rank {rank}')"
    )  # fmt: skip
    processes = [start(body, str(tmp_path / "store"), rank=rank, wait=60) for rank in (0, 1)]
    (code_0, _, err_0), (code_1, _, err_1) = (finish(process) for process in processes)
    assert (code_0, code_1) == (1, 1)
    said = [line for line in (err_0 + err_1).splitlines() if "failure of rank" in line]
    assert said == [f"rank {first}: RuntimeError: failure of rank {first}"]


@pytest.mark.distributed
def test_whoever_sees_a_broken_collective_names_the_rank_that_is_gone(tmp_path: Path) -> None:
    body = JOIN + (
        "    cli.LOST_RANK_WAIT_S = 1.0\n"
        "    if rank == 1:\n"
        "        os._exit(7)\n"
        "    dist.barrier()"
    )  # fmt: skip
    processes = [start(body, str(tmp_path / "store"), rank=rank) for rank in (0, 1)]
    (code, _, err), (other, _, nothing) = (finish(process) for process in processes)
    assert (code, other, nothing) == (1, 7, "")
    said = err.splitlines()[-3:]
    assert said[0].startswith("rank 0: lost rank 1: ended without a message")
    assert said[1].startswith("rank 0: RuntimeError: ")


def test_describe_shortens_what_is_too_long_for_a_line() -> None:
    line = describe(RuntimeError("x" * 5000), 3)
    assert line.startswith("rank 3: RuntimeError: xxx")
    assert line.endswith(" ...")
    assert len(line) < 2100
    assert describe(UserError("y" * 5000), None) == "error: " + "y" * 5000


# --- the root script -------------------------------------------------------------------------------------------


def test_a_mistake_in_the_configuration_is_answered_without_torch(tmp_path: Path, repository: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("model:\n  model_name_or_path: m\ntraining:\n  output_dir: o\n  max_stepz: 5\n")
    # Any import of torch or transformers ends the process with code 77.
    guard = tmp_path / "guard"
    for name in ("torch", "transformers", "numpy", "datasets"):
        (guard / name).mkdir(parents=True)
        (guard / name / "__init__.py").write_text("import os; os._exit(77)")
    command = [sys.executable, "train_fsdp2.py", str(config)]
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    environment["PYTHONPATH"] = str(guard)
    done = subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        f"error: {config}, line 5: unknown field training.max_stepz; did you mean training.max_steps?\n"
    )


def test_help_of_the_root_script(repository: Path) -> None:
    done = subprocess.run(
        [sys.executable, "train_fsdp2.py", "--help"], cwd=repository, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert done.stderr == ""
    assert "--training.output_dir" in done.stdout


def test_parsing_and_checking_import_no_tensor_library(tmp_path: Path, repository: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "model.safetensors").touch()
    program = (
        "import sys\n"
        "from mindspeed_llm.fsdp2.config import check_config, parse_command_line, resolved_dict\n"
        "config = parse_command_line(sys.argv[1:]).config\n"
        "check_config(config, world_size=4)\n"
        "resolved_dict(config)\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'datasets', 'megatron'} & set(sys.modules)))\n"
    )
    argv = ["--model.model_name_or_path", str(tmp_path), "--training.output_dir", str(tmp_path / "out")]
    argv += ["--data.dataset", '{"file_name": "a.jsonl"}']
    done = subprocess.run(
        [sys.executable, "-c", program, *argv], cwd=repository, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


def test_a_reader_that_has_seen_enough_is_not_told_of_an_error(repository: Path) -> None:
    command = f"{sys.executable} train_fsdp2.py --help | head -n 1"
    done = subprocess.run(command, shell=True, cwd=repository, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage:") and done.stderr == ""


def test_a_broken_pipe_of_something_else_is_an_error() -> None:
    script = (
        "import sys\n"
        "from mindspeed_llm import cli\n"
        "def main(argv):\n"
        "    raise BrokenPipeError(32, 'a socket of the library')\n"
        "cli.run(main, [])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "a socket of the library" in done.stderr
