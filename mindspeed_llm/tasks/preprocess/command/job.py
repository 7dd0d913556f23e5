"""Everything that a run needs, found and checked: input, tokenizer, work on records, names of the output."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.chunks import Work
from mindspeed_llm.tasks.preprocess.command.arguments import Arguments
from mindspeed_llm.tasks.preprocess.command.checks import check_handler
from mindspeed_llm.tasks.preprocess.command.identity import hash_of
from mindspeed_llm.tasks.preprocess.command.inputs import Inputs, resolve_inputs
from mindspeed_llm.tasks.preprocess.command.publish import check_prefix
from mindspeed_llm.tasks.preprocess.command.record_mistakes import CheckedWork
from mindspeed_llm.tasks.preprocess.dataset_info import DatasetEntry
from mindspeed_llm.tasks.preprocess.handlers import Handler, WorkOptions, find_handler, make_work, with_entries
from mindspeed_llm.tasks.preprocess.map_keys import check_columns, parse_map_keys
from mindspeed_llm.tasks.preprocess.readers import Record
from mindspeed_llm.tasks.preprocess.sample_store import key_prefix
from mindspeed_llm.tasks.preprocess.templates import Template
from mindspeed_llm.tasks.preprocess.tokenizers import Tokenizer, TokenizerOptions, load_tokenizer

_LOG = logging.getLogger("mindspeed_llm")

FORMAT = 2
"""Of the summary file. It is raised when a change of the program makes other output of the same input."""

CHECKED_RECORDS = 20
"""So many records of each file are worked on before anything is written."""

_THINKING = {"true": True, "false": False, "none": None}
# Arguments that decide the result and stand in the summary as they are.
_DECIDING = (
    "mix_strategy", "interleave_probs", "max_samples", "prompt_type", "enable_thinking", "drop_thinking",
    "reasoning_effort", "mask_history", "seq_length", "append_eod", "pack", "neat_pack", "pad_to_multiple_of",
    "split_sentences", "keep_newlines", "on_bad_record",
)  # fmt: skip


@dataclass(frozen=True)
class Job:
    """One run of the command.

    `template` is the name of the chat template, None where there is none or it is the tokenizer's own; `options` are
    all settings that decide the result, plain enough for JSON.
    """

    arguments: Arguments
    handler: Handler
    inputs: Inputs
    tokenizer: Tokenizer
    work: Work
    template: str | None
    options: Mapping[str, Any]

    @property
    def prefix(self) -> Path:
        """The beginning of the names of the output."""
        assert self.arguments.output_prefix is not None
        return Path(self.arguments.output_prefix)

    @property
    def level(self) -> str:
        """What a sequence of the output is: a document (or sample), or a sentence."""
        return "sentence" if self.arguments.split_sentences else "document"

    def target(self, key: str) -> Path:
        """The prefix of the indexed file of a key."""
        return key_prefix(self.prefix, key, is_text=self.handler.kind == "pretrain", level=self.level)

    @property
    def pad_id(self) -> int:
        """The id that packs are filled up with."""
        pad, eos = self.tokenizer.pad_token_id, self.tokenizer.eos_token_id
        if pad is None and eos is None:
            raise UserError("--pack fills packs up with the pad token, but the tokenizer has neither pad nor eos token")
        return eos if pad is None else pad  # type: ignore[return-value]


def prepare(arguments: Arguments, tokenizer: Tokenizer | None = None) -> tuple[Job, list[Record]]:
    """Find and check everything; returns the job and the first records, which the work has been tried on.

    `tokenizer` is the one of the flags where it is loaded already.

    Raises UserError: whatever is wrong with flags, input, tokenizer, template, or the first records.
    """
    handler = find_handler(arguments.handler_name)
    check_handler(arguments, handler)
    columns, tags = parse_map_keys(arguments.map_keys, handler) if arguments.map_keys is not None else ({}, {})
    inputs = resolve_inputs(arguments, handler)
    handler = with_entries(handler, inputs.entries) if not handler.formatting else handler
    tokenizer = tokenizer or load_tokenizer(tokenizer_options(arguments))
    if arguments.pad_vocab_size_to is not None and len(tokenizer) > arguments.pad_vocab_size_to:
        raise UserError(
            f"--pad-vocab-size-to {arguments.pad_vocab_size_to}: the tokenizer has {len(tokenizer)} tokens, more than "
            "the model will have rows; use the tokenizer of the model, or a larger number"
        )
    options = WorkOptions(
        prompt_type=arguments.prompt_type,
        templates_file=Path(arguments.prompt_type_path) if arguments.prompt_type_path else None,
        enable_thinking=_THINKING[arguments.enable_thinking],
        drop_thinking=arguments.drop_thinking == "true",
        reasoning_effort=arguments.reasoning_effort,
        seq_length=arguments.seq_length,
        mask_history=arguments.mask_history,
        append_eod=arguments.append_eod,
        json_keys=arguments.json_keys if handler.takes_json_keys else WorkOptions.json_keys,
        columns=columns,
        tags=tags,
        additional_keys=arguments.dataset_additional_keys,
        pad_to_multiple_of=arguments.pad_to_multiple_of,
        split_sentences=arguments.split_sentences,
        keep_newlines=arguments.keep_newlines,
        on_bad_record=arguments.on_bad_record,
        entries=inputs.entries if not handler.formatting else (),
    )
    work = CheckedWork(make_work(handler, tokenizer, options), skips=arguments.on_bad_record == "skip")
    template = None
    if handler.kind != "pretrain":
        from mindspeed_llm.tasks.preprocess.handler_work import make_renderer

        _, template = make_renderer(handler, tokenizer, options)
    deciding = _deciding(arguments, handler, inputs, options)
    deciding |= {"keys": list(work.keys), "tokenizer": tokenizer.identity(), "template": _content_hash(template)}
    for line in _idle(arguments, deciding, template):
        _LOG.info("no effect from %s", line)
    name = template.name if template is not None else None
    # Through JSON, as the summary will have it.
    job = Job(arguments, handler, inputs, tokenizer, work, name, json.loads(json.dumps(deciding)))
    check_prefix(job.prefix, [job.target(key) for key in work.keys])
    if arguments.pack:
        # Asked now, so that a missing token is reported before the work.
        _ = job.pad_id
    first = [] if inputs.is_stream else inputs.first_records(CHECKED_RECORDS)
    if readable := [record for record in first if record.mistake is None]:
        check_columns(columns, readable)
    work(first)
    return job, first


def tokenizer_options(arguments: Arguments) -> TokenizerOptions:
    """The tokenizer flags."""
    return TokenizerOptions(
        kind=arguments.tokenizer_type,
        name_or_path=arguments.tokenizer_name_or_path,
        model=arguments.tokenizer_model,
        vocab_file=arguments.vocab_file,
        merge_file=arguments.merge_file,
        use_fast=not arguments.tokenizer_not_use_fast,
    )


def _deciding(arguments: Arguments, handler: Handler, inputs: Inputs, options: WorkOptions) -> dict[str, Any]:
    deciding: dict[str, Any] = {"format": FORMAT, "handler": handler.name}
    deciding |= {name: getattr(arguments, name) for name in _DECIDING}
    deciding |= {"columns": dict(options.columns), "tags": dict(options.tags)}
    deciding["data_sets"] = [_layout(entry) for entry in options.entries]
    deciding["hub"] = inputs.hub.params if inputs.hub is not None else None
    if inputs.probabilities is not None or any(entry.num_samples is not None for entry in inputs.entries):
        deciding["seed"] = inputs.seed
    return deciding


def _idle(arguments: Arguments, deciding: Mapping[str, Any], template: Template | None) -> list[str]:
    """Flags that are given and have no effect on this input with this template, with the reason."""
    lines = []
    if "seed" in arguments.given and "seed" not in deciding:
        lines.append("--seed: nothing is drawn at random")
    if template is not None and arguments.enable_thinking != "none" and not template.reasoning:
        lines.append(f"--enable-thinking: {template.name} is the template of models that do not reason")
    if template is not None and arguments.drop_thinking == "false":
        if template.layout == "slots" and not template.thinking.parsed:
            lines.append(f"--drop-thinking: template {template.name} keeps all thoughts in any case")
    return lines


def _content_hash(template: Template | None) -> str | None:
    return None if template is None else hash_of(json.loads(json.dumps(asdict(template))))


def _layout(entry: DatasetEntry) -> list[Any]:
    return [entry.formatting, dict(entry.columns), dict(entry.tags), entry.num_samples, len(entry.files)]
