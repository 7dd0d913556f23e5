"""The examples of the pages about serving, as they stand there."""

from __future__ import annotations

from argparse import Namespace

import pytest

from mindspeed_llm.tasks.inference.arguments.inference import inference_arguments
from mindspeed_llm.tasks.inference.serve import app, asked, worker
from mindspeed_llm.tasks.inference.serve.check import KEY_VARIABLE
from mindspeed_llm.tasks.inference.serve.service import WAITING
from tests.docs.pages import ROOT, blocks, split_commands
from tests.tasks.inference.serve import serving

PAGES = [ROOT / "docs" / language / "serving.md" for language in ("en", "zh")]


def test_the_clients_of_the_pages_are_answered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    [code], [other] = (blocks(page, "python") for page in PAGES)
    assert code == other
    monkeypatch.setattr(serving, "MODEL", "model")
    with serving.serving(serving.reciting_lm("tall and green, and it said nothing.")) as service:
        exec(compile(code.replace("http://127.0.0.1:8000/v1", service.url), "serving.md", "exec"), {})
    assert len(capsys.readouterr().out) > 30


def test_the_commands_of_the_pages_are_read() -> None:
    found: list[Namespace] = []
    for page in PAGES:
        for body in blocks(page, "sh"):
            for command in split_commands(page.name, body):
                if "inference.py" in command.words:
                    found.append(inference_arguments(command.words[2:]))
                    assert all(name.startswith(f"{KEY_VARIABLE}=") for name in command.environment)
    assert [(args.serve, args.host, args.port) for args in found] == [
        (True, "127.0.0.1", 8000),
        (True, "0.0.0.0", 8000),
    ] * 2


@pytest.mark.parametrize("page", PAGES, ids=["en", "zh"])
def test_the_numbers_of_the_pages_are_those_of_the_code(page) -> None:
    text = page.read_text(encoding="utf-8")
    numbers = {
        f"{app.BODY_LIMIT // 2**20} MiB",
        f" {worker.GRACE_S:.0f} ",
        f" {WAITING} ",
        f" {asked._MOST_STOPS} ",
        str(asked._MOST_LOGPROBS),
        str(asked._DEFAULT_MAX_TOKENS),
    }
    assert not [number for number in numbers if number not in text]
