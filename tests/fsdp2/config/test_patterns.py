"""The pattern language against names chosen by hand."""

from __future__ import annotations

import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.fsdp2.config.patterns import compile_pattern, matches


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        (
            "model.layers.{*}",
            ["model.layers.0", "model.layers.117"],
            [
                "model.layers",
                "model.layers.",
                "model.layers.1.mlp",
                "model.layers.x",
                "model.layers.-1",
                "a.model.layers.1",
            ],
        ),
        (
            "model.layers.{2-11}",
            ["model.layers.2", "model.layers.9", "model.layers.11"],
            ["model.layers.1", "model.layers.12", "model.layers.22", "model.layers.111", "model.layers.02"],
        ),
        ("layers.{3-3}.mlp", ["layers.3.mlp"], ["layers.33.mlp", "layers.3.mlpx"]),
        ("*.q_proj", ["a.q_proj", "a.b.c.q_proj", ".q_proj"], ["q_proj", "a.q_proj.lora", "aXq_projX"]),
        ("*lm_head", ["lm_head", "model.lm_head"], ["lm_head.weight"]),
        ("*", ["", "a.b"], []),
        ("h.?", ["h.1", "h.x", "h.."], ["h.", "h.12"]),
        ("model.embed_tokens", ["model.embed_tokens"], ["modelXembed_tokens", "model.embed_tokens2"]),
        ("a[0]+(b)|c", ["a[0]+(b)|c"], ["a0", "c", "a[0]"]),
        ("h.{*}.{0-1}", ["h.12.1"], ["h.12.2", "h.1"]),
        ("lm_head", ["lm_head"], ["lm_head\n", "\nlm_head"]),
    ],
)
def test_pattern_matches_exactly_the_names_it_means(pattern: str, yes: list[str], no: list[str]) -> None:
    assert [name for name in yes if not matches(pattern, name)] == []
    assert [name for name in no if matches(pattern, name)] == []


def test_compiled_pattern_is_anchored_for_every_method() -> None:
    expression = compile_pattern("layers.{0-1}")
    for method in (expression.match, expression.search, expression.fullmatch):
        assert method("layers.1")
        assert not method("layers.1.mlp")
        assert not method("model.layers.1")


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("layers.{", "stray '{' at character 8"),
        ("layers.}", "stray '}' at character 8"),
        ("layers.{1}", "stray '{'"),
        ("layers.{1,3}", "stray '{'"),
        ("layers.{a-b}", "stray '{'"),
        ("layers.{-3}", "stray '{'"),
        ("layers.{1-}", "stray '{'"),
        ("layers.{**}", "stray '{'"),
        ("layers.{{*}}", "stray '{'"),
        ("layers.{*}}", "stray '}' at character 11"),
        ("layers.{5-2}", "5 is above 2"),
        ("layers.{0-99999999}", "more than 10000"),
        ("", "empty"),
        (" lm_head", "spaces"),
    ],
)
def test_bad_pattern_is_a_user_error_that_quotes_it(pattern: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        compile_pattern(pattern)
    assert message in str(error.value)
    assert repr(pattern) in str(error.value)
