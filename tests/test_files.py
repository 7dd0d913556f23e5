"""Files that are published by renaming stand where symbolic links of their names point; the system's own `open` is the
judge of where that is.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mindspeed_llm.files import behind_links, why_uncreatable, write_durably
from mindspeed_llm.observability.metrics_file import _keep
from mindspeed_llm.tasks.evaluation.results import publish

_RECORD = {"iteration": 1}
WRITERS: dict[str, Callable[[Path], object]] = {
    "results.json": lambda path: publish(path.parent, _RECORD, iter(())),
    "samples.jsonl": lambda path: publish(path.parent, {}, iter([_RECORD])),
    "metrics.jsonl": lambda path: _keep(path, lambda record: True),
    "any": lambda path: write_durably(path, json.dumps(_RECORD), through_links=True),
}


@pytest.mark.parametrize("name", WRITERS)
def test_the_target_of_a_link_is_written(tmp_path: Path, name: str) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    link, target = tmp_path / "here" / name, tmp_path / "there" / "target"
    (tmp_path / "there" / "second").symlink_to("target")
    link.symlink_to("../there/second")
    with link.open("w") as stream:
        stream.write(json.dumps(_RECORD) + "\n")
    before = target.stat().st_ino
    WRITERS[name](link)
    assert link.is_symlink() and (tmp_path / "there" / "second").is_symlink()
    # Another file in its place, by one rename; nothing is left beside it.
    assert target.stat().st_ino != before and json.loads(target.read_text()) == _RECORD
    assert sorted(file.name for file in (tmp_path / "there").iterdir()) == ["second", "target"]


def test_links_that_dangle(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "new")
    assert why_uncreatable(link) is None and not (tmp_path / "new").exists()
    write_durably(link, iter(["a", "b"]), through_links=True)
    assert link.is_symlink() and (tmp_path / "new").read_text() == "ab"
    lost = tmp_path / "lost"
    lost.symlink_to(tmp_path / "no/new")
    assert why_uncreatable(lost) == f"it is a symbolic link to {tmp_path}/no/new, and there is no folder {tmp_path}/no"
    for name, other in (("one", "two"), ("two", "one")):
        (tmp_path / name).symlink_to(other)
    assert why_uncreatable(tmp_path / "one") == "Too many levels of symbolic links"
    with pytest.raises(OSError, match="Too many levels"):
        write_durably(tmp_path / "one", "", through_links=True)
    plain = Path("plain")
    assert behind_links(plain) is plain


def test_a_link_that_was_not_named_by_a_user_is_replaced(tmp_path: Path) -> None:
    """A run that was put together from links does not change the files of the other one."""
    (tmp_path / "other").write_text("100")
    (tmp_path / "tracker").symlink_to("other")
    write_durably(tmp_path / "tracker", "5")
    assert ((tmp_path / "tracker").read_text(), (tmp_path / "other").read_text()) == ("5", "100")


def test_nothing_is_left_of_a_content_that_breaks_off(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        write_durably(tmp_path / "file", (str(1 / number) for number in (1, 0)))
    assert list(tmp_path.iterdir()) == []
