"""Characters that cannot be seen."""

import pytest

from mindspeed_llm.tasks.preprocess.inspection.visible import escaped, one_line, visible


@pytest.mark.parametrize(
    "text, expected",
    [
        ("plain é 中文 😀 नमस्ते", "plain é 中文 😀 नमस्ते"),
        ("a\nb\tc\rd", "a↵b⇥c\\rd"),
        ("\x1b[31mred\x00\x7f\x9b", "\\x1b[31mred\\x00\\x7f\\x9b"),
        ("zero\u200bwidth\ufeff", "zero\\u200bwidth\\ufeff"),
        ("turned \u202eabc\u2066", "turned \\u202eabc\\u2066"),
        ("no\u00a0break thin\u2009", "no\\xa0break thin\\u2009"),
        ("line\u2028paragraph\u2029", "line\\u2028paragraph\\u2029"),
        ("private \ue000 \U000f0000", "private \\ue000 \\U000f0000"),
        ("👨‍👩‍👧 می‌خواهم ❤️ \U0001f3f4\U000e0067\U000e007f", "👨‍👩‍👧 می‌خواهم ❤️ \U0001f3f4\U000e0067\U000e007f"),
        ("wide\u3000space", "wide\u3000space"),
        ("", ""),
    ],
)
def test_signs(text, expected):
    assert one_line(text) == expected


def test_kinds_and_ascii():
    assert list(visible("a\n\t\x00")) == [("text", "a"), ("newline", "↵"), ("tab", "⇥"), ("sign", "\\x00")]
    assert one_line("a\n\t", ascii_signs=True) == "a\\n\\t"
    assert escaped("{+⟦😀") == "\\x7b\\x2b\\u27e6\\U0001f600"
