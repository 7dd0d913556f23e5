"""Fail when a JUnit report of pytest holds no test that ran: a run where all are skipped must not pass for green."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path


def tests_that_ran(report: Path) -> int:
    """Return the number of tests in ``report`` that were neither skipped nor deselected."""
    root = ElementTree.parse(report).getroot()
    suites = root.iter("testsuite")
    return sum(int(suite.get("tests", "0")) - int(suite.get("skipped", "0")) for suite in suites)


def main(argv: list[str] | None = None) -> int:
    """Command line entry: the report's path; returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    if len(arguments) != 1:
        print("usage: count_tests.py REPORT.xml", file=sys.stderr)
        return 2
    ran = tests_that_ran(Path(arguments[0]))
    if ran == 0:
        print("test.sh: error: no test ran (all skipped, or none selected)", file=sys.stderr)
        return 1
    print(f"== {ran} tests ran")
    return 0


if __name__ == "__main__":
    sys.exit(main())
