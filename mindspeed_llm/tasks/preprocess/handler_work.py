"""The work on records that a handler and the user's options ask for."""

import difflib
from dataclasses import fields
from typing import Any

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.chat_template import ChatTemplateRenderer
from mindspeed_llm.tasks.preprocess.chunks import Work
from mindspeed_llm.tasks.preprocess.conversation_work import ConversationWork
from mindspeed_llm.tasks.preprocess.handler_flags import USED_BY, check_flag
from mindspeed_llm.tasks.preprocess.handlers import Handler, WorkOptions
from mindspeed_llm.tasks.preprocess.pairwise_work import PairwiseWork
from mindspeed_llm.tasks.preprocess.prompt_work import PromptWork
from mindspeed_llm.tasks.preprocess.records import RecordLayout
from mindspeed_llm.tasks.preprocess.records.pretrain_texts import AlpacaText, StackOverflowText, conversation_text
from mindspeed_llm.tasks.preprocess.render import Renderer, TemplateRenderer
from mindspeed_llm.tasks.preprocess.samples import UNLIMITED, SampleOptions
from mindspeed_llm.tasks.preprocess.template_marks import warn_of_split_marks
from mindspeed_llm.tasks.preprocess.templates import TEMPLATES_FILE, Template, load_template, template_names
from mindspeed_llm.tasks.preprocess.text_work import TextWork
from mindspeed_llm.tasks.preprocess.tokenizers import Tokenizer, as_tokenizer

_FLAG_FIELDS = {"templates_file": "prompt_type_path", "additional_keys": "dataset_additional_keys"}
"""Option -> the field of its flag, where that is called otherwise."""


def build_work(handler: Handler, tokenizer: Any, options: WorkOptions) -> Work:
    """See `handlers.make_work`."""
    _check_options(handler, options)
    ours = as_tokenizer(tokenizer)
    if handler.kind == "pretrain":
        return _text_work(handler, ours, options)
    renderer, template = make_renderer(handler, ours, options)
    layouts = _layouts(handler, options)
    cutoff_len = options.seq_length or UNLIMITED
    on_mistakes = {"on_bad_record": options.on_bad_record, "on_bad_conversation": options.on_bad_record}
    if handler.kind == "prompt":
        return PromptWork(
            renderer, ours, layouts, cutoff_len=cutoff_len, additional_keys=options.additional_keys, **on_mistakes
        )
    eod_id = _eod_id(ours, template) if options.append_eod else None
    sample_options = SampleOptions(cutoff_len, mask_history=options.mask_history, eod_id=eod_id)
    if handler.kind == "pairwise":
        return PairwiseWork(renderer, sample_options, layouts, **on_mistakes)
    return ConversationWork(renderer, sample_options, layouts, attention_mask=True, **on_mistakes)


def make_renderer(handler: Handler, tokenizer: Tokenizer, options: WorkOptions) -> tuple[Renderer, Template | None]:
    """The renderer of --prompt-type, else of the handler's own template, else of the tokenizer's chat template; with
    the template, None for the tokenizer's own.

    A handler that brings a template and takes another leaves the tokenizer's own the first choice. Raises UserError
    naming the flags where no template is found, or one too many.
    """
    template = _chosen_template(handler, tokenizer, options)
    if template is not None:
        warn_of_split_marks(template, tokenizer)
        renderer = TemplateRenderer(
            template,
            tokenizer,
            enable_thinking=options.enable_thinking,
            drop_thinking=options.drop_thinking,
            reasoning_effort=options.reasoning_effort,
        )
        return renderer, template
    for name in ("drop_thinking", "reasoning_effort"):
        if getattr(options, name) != getattr(WorkOptions, name):
            raise UserError(
                f"--{name.replace('_', '-')} needs --prompt-type: the tokenizer's own chat template is used, which "
                "does not know it"
            )
    own = ChatTemplateRenderer(tokenizer, enable_thinking=options.enable_thinking, last_only=options.mask_history)
    return own, None


def _chosen_template(handler: Handler, tokenizer: Tokenizer, options: WorkOptions) -> Template | None:
    file = options.templates_file or TEMPLATES_FILE
    name = options.prompt_type
    if name is not None and name not in template_names(file):
        known = template_names(file)
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UserError(f"--prompt-type {name!r}: no such template; {hint}expected one of {', '.join(sorted(known))}")
    if name is None and handler.takes_prompt_type and tokenizer.chat_template:
        return None
    name = name or handler.template
    if name is None:
        raise UserError(
            f"--handler-name {handler.name} needs a chat template, and the tokenizer brings none: name the template "
            f"that the model was trained with by --prompt-type ({', '.join(sorted(template_names(file)))})"
        )
    return load_template(name, file)


def _layouts(handler: Handler, options: WorkOptions) -> list[RecordLayout]:
    if options.entries:
        return [entry.layout for entry in options.entries]
    assert handler.formatting, "entries are given where dataset_info.json says the layout"
    return [RecordLayout(handler.formatting, {**handler.columns, **options.columns}, {**handler.tags, **options.tags})]


def _eod_id(tokenizer: Tokenizer, template: Template | None) -> int:
    """The id that ends samples: the tokenizer's eos token, or the end marker that the template puts in its place."""
    if template is not None and template.replace_eos:
        return tokenizer.get_vocab()[template.stop_words[0]]
    if tokenizer.eos_token_id is None:
        raise UserError(
            "--append-eod: the tokenizer has no eos token to append; name one in its tokenizer_config.json, or leave "
            "the flag out"
        )
    return tokenizer.eos_token_id


def _text_work(handler: Handler, tokenizer: Tokenizer, options: WorkOptions) -> TextWork:
    columns = {**handler.columns, **options.columns}
    text_of = {
        "text": None,
        "alpaca": AlpacaText(columns),
        "sharegpt": conversation_text,
        "stackoverflow": StackOverflowText(columns),
    }[handler.formatting]
    return TextWork(
        tokenizer,
        options.json_keys if handler.takes_json_keys else handler.keys,
        text_of=text_of,
        append_eod=options.append_eod,
        piece_length=options.seq_length,
        pad_to_multiple_of=options.pad_to_multiple_of,
        split_sentences=options.split_sentences,
        keep_newlines=options.keep_newlines,
        on_bad_record=options.on_bad_record,
    )


def _check_options(handler: Handler, options: WorkOptions) -> None:
    untouched = WorkOptions()
    for item in fields(WorkOptions):
        name = _FLAG_FIELDS.get(item.name, item.name)
        if name in USED_BY and getattr(options, item.name) != getattr(untouched, item.name):
            check_flag(name, handler)
