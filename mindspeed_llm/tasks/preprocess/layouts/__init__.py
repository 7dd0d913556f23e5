"""Layouts: how a template's data becomes the text of a conversation."""

from collections.abc import Callable

from mindspeed_llm.tasks.preprocess.layouts.base import Layout, PieceTurn, RenderOptions, piece_text
from mindspeed_llm.tasks.preprocess.layouts.deepseek4 import DeepSeek4Layout
from mindspeed_llm.tasks.preprocess.layouts.harmony import HarmonyLayout
from mindspeed_llm.tasks.preprocess.layouts.slots import SlotLayout
from mindspeed_llm.tasks.preprocess.templates import Template

__all__ = ["Layout", "PieceTurn", "RenderOptions", "make_layout", "piece_text"]

_LAYOUTS: dict[str, Callable[[Template, RenderOptions], Layout]] = {
    "slots": SlotLayout,
    "harmony": HarmonyLayout,
    "deepseek4": DeepSeek4Layout,
}


def make_layout(template: Template, options: RenderOptions) -> Layout:
    """The layout of the template; raises UserError for options that it cannot follow."""
    return _LAYOUTS[template.layout](template, options)
