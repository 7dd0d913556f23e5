"""Texts that are none: the judge is whether Python can write them as UTF-8."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.valid_text import check_words, invalid_part, why_invalid


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("\ud800", r"x holds \ud800 at character 0, one half of a surrogate pair"),
        ({"a": [{"b": "ab\udfff"}]}, r"x.a[0].b holds \udfff at character 2"),
        ({"a": {"\udc00": 1}}, r"the name '\udc00' in x.a holds \udc00 at character 0"),
        # Both halves are a character; and what is no text is nobody's mistake here.
        (["\ud83d\ude00", 3, None, True, {"é": "中"}], None),
    ],
)
def test_the_place_in_a_value_is_named(value: Any, said: str | None) -> None:
    value = json.loads(json.dumps(value))
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        assert said is not None and (invalid_part(value, "x") or "").startswith(said)
    else:
        assert said is None and invalid_part(value, "x") is None


def test_bytes_of_a_command_line_are_named() -> None:
    word = b"h\xffi".decode("utf-8", "surrogateescape")
    assert why_invalid(word, encoding="utf-8") == "holds the byte 0xff at character 1, which is not UTF-8"
    for argv in (["--load", "é", "--stop", "a", word], ["--load", "é", f"--stop={word}"]):
        with pytest.raises(UserError, match=r"^--stop: 'h\\udcffi' holds the byte 0xff at character 1"):
            check_words(argv, "utf-8")
    check_words(["--load", os.fsdecode("é=".encode()), "x"], "utf-8")
