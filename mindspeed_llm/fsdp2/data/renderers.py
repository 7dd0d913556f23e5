"""Which renderer the data section asks for."""

from typing import Any

from mindspeed_llm.errors import UserError
from mindspeed_llm.fsdp2.config.data_config import DataConfig
from mindspeed_llm.tasks.preprocess.chat_template import ChatTemplateRenderer
from mindspeed_llm.tasks.preprocess.render import Renderer, TemplateRenderer
from mindspeed_llm.tasks.preprocess.template_marks import warn_of_split_marks
from mindspeed_llm.tasks.preprocess.templates import Template, load_template, template_names
from mindspeed_llm.tasks.preprocess.tokenizers import as_tokenizer


def make_renderer(data: DataConfig, tokenizer: Any) -> Renderer:
    """The renderer of `data.template`; null is the tokenizer's own chat template.

    A template that brings its own end marker makes it the tokenizer's eos token, so that a model trained on it stops
    there when it generates.
    """
    template = chosen_template(data, tokenizer)
    if template is None:
        if data.tool_format is not None:
            raise UserError(
                f"data.tool_format {data.tool_format!r} needs data.template: the tokenizer's chat template has its own"
            )
        renderer: Renderer = ChatTemplateRenderer(
            tokenizer,
            enable_thinking=data.enable_thinking,
            default_system=data.default_system,
            last_only=data.mask_history,
        )
    else:
        warn_of_split_marks(template, as_tokenizer(tokenizer))
        renderer = TemplateRenderer(template, tokenizer, enable_thinking=data.enable_thinking)
    if renderer.efficient_eos_id is not None and data.train_on_prompt:
        name = f"template {template.name!r}" if template is not None else "the tokenizer's chat template"
        raise UserError(
            f"data.train_on_prompt is true, but {name} closes replies by the label of the next prompt token, which "
            "would then have two targets; set train_on_prompt to false"
        )
    if template is not None and template.replace_eos:
        tokenizer.eos_token = template.stop_words[0]
    return renderer


def chosen_template(data: DataConfig, tokenizer: Any) -> Template | None:
    """The template given as data, or None for the tokenizer's own. Raises UserError where there is neither."""
    if data.template is None:
        if tokenizer.chat_template:
            return None
        raise UserError(
            "data.template is not set, and the tokenizer has no chat template. Name the template that the model was "
            f"trained with ({', '.join(sorted(template_names()))}); empty puts prompt and reply one after the other "
            "without any mark"
        )
    template = load_template(data.template)
    return template.with_options(default_system=data.default_system, tool_format=data.tool_format)
