"""test.sh must not pass when every test was skipped or none was selected."""

import subprocess
import sys
from pathlib import Path

import pytest

from scripts import count_tests

TESTS = """
import pytest
def test_one(): pass
def test_two(): assert False
@pytest.mark.skip(reason="shown")
def test_three(): pass
"""


@pytest.mark.parametrize(
    ("selection", "ran"), [("one or two or three", 2), ("one", 1), ("three", 0), ("nothing_has_this_name", 0)]
)
def test_tests_that_ran(tmp_path: Path, selection: str, ran: int) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    report = tmp_path / "report.xml"
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", "-k", selection],
        cwd=tmp_path,
        capture_output=True,
    )
    assert count_tests.tests_that_ran(report) == ran
    assert count_tests.main([str(report)]) == (0 if ran else 1)
