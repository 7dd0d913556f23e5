"""The handlers: what is made of the records of an input, one declaration each.

A handler names the layout of the records, what they become (documents, conversations, preference pairs, prompts) and
where the chat template comes from. `make_work` builds the work on records from it.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.chunks import Work
from mindspeed_llm.tasks.preprocess.dataset_info import DatasetEntry
from mindspeed_llm.tasks.preprocess.records import FORMATS
from mindspeed_llm.tasks.preprocess.records.pretrain_texts import STACK_OVERFLOW_COLUMNS

Kind = Literal["pretrain", "instruction", "pairwise", "prompt"]

SAMPLE_KEYS: dict[Kind, tuple[str, ...]] = {
    "pretrain": ("text",),
    "instruction": ("input_ids", "attention_mask", "labels"),
    "pairwise": ("chosen_input_ids", "chosen_labels", "rejected_input_ids", "rejected_labels"),
    "prompt": ("input_ids", "attention_mask"),
}
"""The arrays that each kind makes; pretrain handlers that take --json-keys make one for each."""


@dataclass(frozen=True, kw_only=True)
class Handler:
    """One handler.

    `formatting` is a record format, "text" for columns of plain text, "" where dataset_info.json says it.
    `template` is the chat template that the handler brings; with `takes_prompt_type` it is used where neither
    --prompt-type nor the tokenizer gives one.
    """

    name: str
    kind: Kind
    formatting: str
    doc: str
    takes_prompt_type: bool = False
    template: str | None = None
    takes_json_keys: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        """The arrays that are made, before --json-keys and --dataset-additional-keys."""
        return SAMPLE_KEYS[self.kind]

    @property
    def columns(self) -> Mapping[str, str]:
        """Role -> column, as long as --map-keys says nothing else."""
        if self.formatting == "stackoverflow":
            return STACK_OVERFLOW_COLUMNS
        if self.formatting not in FORMATS or self.takes_json_keys:
            return {}
        return {role: column for role, column in FORMATS[self.formatting].columns.items() if role in self._roles}

    @property
    def tags(self) -> Mapping[str, str]:
        """The tags of messages, as long as --map-keys says nothing else."""
        return {} if self.takes_json_keys or self.formatting not in FORMATS else FORMATS[self.formatting].tags

    @property
    def _roles(self) -> tuple[str, ...]:
        roles = FORMATS[self.formatting].columns
        if self.kind == "pretrain":
            return ("prompt", "query", "response")
        unused = ("response",) if self.kind == "pairwise" else ("chosen", "rejected")
        return tuple(role for role in roles if role not in unused)


@dataclass(frozen=True, kw_only=True)
class WorkOptions:
    """What the user chose beside the handler; the fields are the flags of the same names.

    `columns` and `tags` are what --map-keys gives (see `parse_map_keys`), `entries` the data sets of
    dataset_info.json. `seq_length` None cuts nothing.
    """

    prompt_type: str | None = None
    templates_file: Path | None = None
    enable_thinking: bool | None = None
    drop_thinking: bool = True
    reasoning_effort: str | None = None
    seq_length: int | None = None
    mask_history: bool = False
    append_eod: bool = False
    json_keys: tuple[str, ...] = ("text",)
    columns: Mapping[str, str | None] = field(default_factory=dict)
    tags: Mapping[str, str | None] = field(default_factory=dict)
    additional_keys: tuple[str, ...] = ()
    pad_to_multiple_of: int = 1
    split_sentences: bool = False
    keep_newlines: bool = False
    on_bad_record: str = "error"
    entries: tuple[DatasetEntry, ...] = ()


def find_handler(name: str) -> Handler:
    """The handler of that name, the general one for plain text where the name is empty.

    Raises UserError with the nearest name for one that is not known.
    """
    if not name:
        return HANDLERS[DEFAULT_HANDLER]
    if name not in HANDLERS:
        near = difflib.get_close_matches(name, HANDLERS, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UserError(f"--handler-name {name!r}: no such handler; {hint}expected one of {', '.join(HANDLERS)}")
    return HANDLERS[name]


def with_entries(handler: Handler, entries: tuple[DatasetEntry, ...]) -> Handler:
    """The handler for data sets of dataset_info.json, which decide whether pairs are made.

    Raises UserError where some are preference pairs and others are not.
    """
    rankings = {entry.ranking for entry in entries}
    if len(rankings) > 1:
        pairs = ", ".join(entry.name for entry in entries if entry.ranking)
        others = ", ".join(entry.name for entry in entries if not entry.ranking)
        raise UserError(
            f"--input: {pairs} hold preference pairs (ranking is true) and {others} do not; preprocess them one by one"
        )
    return replace(handler, kind="pairwise") if rankings == {True} else handler


def make_work(handler: Handler, tokenizer: Any, options: WorkOptions) -> Work:
    """The work on records of a handler. Raises UserError for options that do not fit the handler or the tokenizer.

    `tokenizer` is one of ours or of transformers.
    """
    # Here, since listing the handlers and their mistakes needs none of it.
    from mindspeed_llm.tasks.preprocess.handler_work import build_work

    return build_work(handler, tokenizer, options)


DEFAULT_HANDLER = "GeneralPretrainHandler"

_DECLARATIONS = (
    Handler(
        name=DEFAULT_HANDLER,
        kind="pretrain",
        formatting="text",
        doc="text of the columns of --json-keys, one pair of files for each",
        takes_json_keys=True,
    ),
    Handler(
        name="AlpacaPretrainHandler",
        kind="pretrain",
        formatting="alpaca",
        doc="instruction, input and output as one text with a fixed prompt",
    ),
    Handler(
        name="SharegptPretrainHandler",
        kind="pretrain",
        formatting="sharegpt",
        doc="lists of messages in the columns of --json-keys, their texts one after the other",
        takes_json_keys=True,
    ),
    Handler(
        name="StackOverflowPythonPretrainHandler",
        kind="pretrain",
        formatting="stackoverflow",
        doc="title, question_body and answer_body as one text",
    ),
    Handler(
        name="LlamaFactoryInstructionHandler",
        kind="instruction",
        formatting="",
        doc="data sets by their names in dataset_info.json, which says how they are laid out; several are mixed",
        takes_prompt_type=True,
    ),
    Handler(
        name="AlpacaStyleInstructionHandler",
        kind="instruction",
        formatting="alpaca",
        doc="instruction, input, output; also history (pairs), system, tools",
        takes_prompt_type=True,
    ),
    Handler(
        name="SharegptStyleInstructionHandler",
        kind="instruction",
        formatting="sharegpt",
        doc="conversations (messages with from and value); also system, tools",
        takes_prompt_type=True,
    ),
    Handler(
        name="OpenAIInstructionHandler",
        kind="instruction",
        formatting="openai",
        doc="messages (role, content, tool_calls, tool_call_id, reasoning_content); also tools",
        takes_prompt_type=True,
    ),
    Handler(
        name="HunyuanInstructionHandler",
        kind="instruction",
        formatting="openai",
        doc="messages, in the tokenizer's own chat template or, where it has none, in Hunyuan's",
        takes_prompt_type=True,
        template="hunyuan",
    ),
    Handler(
        name="GeneralInstructionHandler",
        kind="instruction",
        formatting="alpaca",
        doc="instruction, input, output in the template alpaca",
        template="alpaca",
    ),
    Handler(
        name="BelleMultiTurnInstructionHandler",
        kind="instruction",
        formatting="belle",
        doc='chats in one instruction, turns behind "Human:" and "Assistant:", in the template alpaca',
        template="alpaca",
    ),
    Handler(
        name="MOSSInstructionHandler",
        kind="instruction",
        formatting="moss",
        doc="chat (turns with Human and MOSS) in the template alpaca",
        template="alpaca",
    ),
    Handler(
        name="MOSSMultiTurnHandler",
        kind="instruction",
        formatting="moss",
        doc="chat (turns with Human and MOSS) in the template baichuan2",
        template="baichuan2",
    ),
    Handler(
        name="LeetcodePythonInstructionHandler",
        kind="instruction",
        formatting="leetcode",
        doc="code_with_problem, code_only and explanation_only in the template alpaca",
        template="alpaca",
    ),
    Handler(
        name="AlpacaStylePairwiseHandler",
        kind="pairwise",
        formatting="alpaca",
        doc="instruction, input, chosen, rejected; also history, system, tools",
        takes_prompt_type=True,
    ),
    Handler(
        name="SharegptStylePairwiseHandler",
        kind="pairwise",
        formatting="sharegpt",
        doc="conversations that end with the user, chosen and rejected (messages); also system, tools",
        takes_prompt_type=True,
    ),
    Handler(
        name="PPOAlpacaStyleInstructionHandler",
        kind="prompt",
        formatting="alpaca",
        doc="instruction, input as prompts without an answer",
        takes_prompt_type=True,
    ),
    Handler(
        name="R1AlpacaStyleInstructionHandler",
        kind="prompt",
        formatting="alpaca",
        doc="instruction, input as prompts, with the columns of --dataset-additional-keys",
        takes_prompt_type=True,
    ),
    Handler(
        name="R1SharegptStyleInstructionHandler",
        kind="prompt",
        formatting="sharegpt",
        doc="conversations up to the last question as prompts, with the columns of --dataset-additional-keys",
        takes_prompt_type=True,
    ),
)

HANDLERS: dict[str, Handler] = {handler.name: handler for handler in _DECLARATIONS}
"""Name -> handler."""
