"""The flags of `preprocess_data.py`: one field each, from which the parser and `--help` are made."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from mindspeed_llm.tasks.preprocess.mixing import STRATEGIES
from mindspeed_llm.tasks.preprocess.tokenizers.base import TOKENIZER_KINDS

GROUPS = {
    "input": "Input: what is read",
    "records": "Records: how they become samples",
    "tokenizer": "Tokenizer",
    "output": "Output",
    "runtime": "Run",
    "other": "Instead of preprocessing",
}


def _flag(group: str, default: Any, doc: str, **rest: Any) -> Any:
    """A flag: `values` are the allowed ones, `at_least` the smallest number, `shown` the default as `--help` has it."""
    return field(default=default, metadata={"group": group, "doc": doc, **rest})


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """All flags with their values; `given` are the names of those that stand on the command line."""

    # Input
    input: str | None = _flag(
        "input",
        None,
        "what to read: a file (json, jsonl, parquet, arrow, csv, txt; also .gz and .zst), a folder with files of one "
        "of these types, or, where no such path exists, the name of a data set on the Hugging Face hub. With "
        "LlamaFactoryInstructionHandler: names in dataset_info.json, separated by commas. With --merge-group-keys: "
        "the folder that holds the parts.",
        metavar="PATH",
    )
    handler_name: str = _flag(
        "input",
        "GeneralPretrainHandler",
        "the layout of the records and what is made of them; the list stands below. An empty name is the default.",
        metavar="HANDLER",
    )
    map_keys: str | None = _flag(
        "input",
        None,
        'which column of the records plays which role, as JSON, e.g. \'{"prompt": "question", "query": ""}\'; an '
        "empty name switches a role off. Roles: prompt, query, response, history, system, tools, chosen, rejected "
        "(alpaca handlers); messages, tags, system, tools, chosen, rejected (sharegpt handlers; tags is an object with "
        "role_tag, content_tag, user_tag, assistant_tag, observation_tag, function_tag, system_tag); messages, system, "
        "tools (OpenAI handler). Roles that are not named keep their column.",
        metavar="JSON",
    )
    json_keys: tuple[str, ...] = _flag(
        "input",
        ("text",),
        "columns to tokenize, one pair of files for each (GeneralPretrainHandler, SharegptPretrainHandler).",
        metavar="COLUMN",
    )
    dataset_dir: str | None = _flag(
        "input",
        None,
        "folder of dataset_info.json and of the files that it names (LlamaFactoryInstructionHandler).",
        metavar="FOLDER",
    )
    mix_strategy: str = _flag(
        "input",
        "concat",
        "how several data sets are put together (LlamaFactoryInstructionHandler): one after the other; taking turns "
        "until one is used up (interleave_under); or until each has been used up once, those that end earlier starting "
        "again (interleave_over).",
        values=STRATEGIES,
    )
    interleave_probs: str | None = _flag(
        "input",
        None,
        "draw the next data set by these probabilities, separated by commas, instead of in turn (with an interleave "
        "strategy of --mix-strategy).",
        metavar="P1,P2,...",
    )
    seed: int = _flag("input", 1234, "seed of the draws of --interleave-probs.", metavar="N", at_least=0)
    max_samples: int | None = _flag(
        "input",
        None,
        "read at most so many records (of each data set, where there are several).",
        metavar="N",
        at_least=1,
    )
    streaming: bool = _flag(
        "input",
        False,
        "read the input once, from front to back, without counting or hashing it before: for pipes, and for hub data "
        "sets that shall not be downloaded as a whole. There is no ETA then.",
    )
    hf_datasets_params: str | None = _flag(
        "input",
        None,
        "JSON file with arguments of datasets.load_dataset for a hub data set: path (in place of --input), name, "
        "data_dir, data_files, revision, split (default train).",
        metavar="FILE",
    )
    cache_dir: str | None = _flag(
        "input",
        None,
        "folder for downloads of hub data sets (default: that of the datasets library). Local files need no cache.",
        metavar="FOLDER",
    )

    # Records
    prompt_type: str | None = _flag(
        "records",
        None,
        "chat template by its name in the file of templates; the list stands below. Left out: the chat template that "
        "the tokenizer brings (instruction, pairwise and prompt handlers that take a template).",
        metavar="TEMPLATE",
    )
    prompt_type_path: str | None = _flag(
        "records", None, "file of chat templates (default: configs/finetune/templates.json).", metavar="FILE"
    )
    enable_thinking: str = _flag(
        "records",
        "none",
        "templates of reasoning models: true trains on thoughts, also on the empty ones that a template writes where "
        "a reply has none; false removes thoughts; none keeps them (deepseek4: removes them), with empty ones in the "
        "prompt.",
        values=("true", "false", "none"),
    )
    drop_thinking: str = _flag(
        "records",
        "true",
        "templates qwen3, glm4_moe, bailing_mini, gpt_oss and deepseek4: leave out the thoughts of earlier turns, as "
        "these models expect it (deepseek4: where no tools are given).",
        values=("true", "false"),
    )
    reasoning_effort: str | None = _flag(
        "records",
        None,
        "how much the model is told to think: low, medium or high (template gpt_oss, medium without the flag); max or "
        "high (deepseek4, with --enable-thinking true; it says nothing for high).",
        metavar="EFFORT",
    )
    mask_history: bool = _flag(
        "records",
        False,
        "loss on the last reply of a conversation only (instruction handlers; pairs always have it there).",
    )
    seq_length: int | None = _flag(
        "records",
        None,
        "longest sample in tokens. Whole turns of a conversation are kept, and the beginning of one more reply; "
        "prompts are never cut, and one that leaves no room for its reply is skipped and counted. A pretraining "
        "document is split, never dropped. Default: nothing is cut.",
        metavar="N",
        at_least=2,
    )
    append_eod: bool = _flag("records", False, "end each document or sample with the tokenizer's eos token.")
    pack: bool = _flag(
        "records",
        False,
        "put several samples in one of exactly --seq-length tokens, the rest filled up with the pad token "
        "(instruction handlers). Samples of a pack see each other.",
    )
    neat_pack: bool = _flag(
        "records",
        False,
        "with --pack: attention_mask holds the number of the sample in its pack (1, 2, ...; 0 is padding), so that "
        "training keeps the samples of a pack apart.",
    )
    pad_to_multiple_of: int = _flag(
        "records",
        1,
        "pad each document with the pad token to a multiple of so many tokens (pretraining handlers).",
        metavar="N",
        at_least=1,
    )
    split_sentences: bool = _flag(
        "records",
        False,
        "make a sequence of each sentence of a document (needs the package nltk and its punkt data); the files are "
        "called <prefix>_<column>_sentence (pretraining handlers).",
    )
    keep_newlines: bool = _flag("records", False, "with --split-sentences: keep the line ends between sentences.")
    dataset_additional_keys: tuple[str, ...] = _flag(
        "records", (), "further columns to tokenize as they are; labels is the answer (R1 handlers).", metavar="COLUMN"
    )
    on_bad_record: str = _flag(
        "records",
        "error",
        "a record with a missing key, a null or a value of the wrong type: stop with file, line and key, or skip and "
        "count it.",
        values=("error", "skip"),
    )

    # Tokenizer
    tokenizer_type: str = _flag("tokenizer", "PretrainedFromHF", "kind of tokenizer.", values=TOKENIZER_KINDS)
    tokenizer_name_or_path: str | None = _flag(
        "tokenizer", None, "model directory or hub name (PretrainedFromHF).", metavar="PATH"
    )
    tokenizer_not_use_fast: bool = _flag("tokenizer", False, "do not use the tokenizer's fast form (PretrainedFromHF).")
    tokenizer_model: str | None = _flag(
        "tokenizer", None, "model file (GPTSentencePieceTokenizer, MagistralTokenizer).", metavar="FILE"
    )
    vocab_file: str | None = _flag("tokenizer", None, "vocabulary (GPT2BPETokenizer).", metavar="FILE")
    merge_file: str | None = _flag("tokenizer", None, "merges (GPT2BPETokenizer).", metavar="FILE")
    make_vocab_size_divisible_by: int = _flag(
        "tokenizer", 128, "padding of the model's vocabulary.", metavar="N", at_least=1
    )
    pad_vocab_size_to: int | None = _flag(
        "tokenizer",
        None,
        "the number of rows that the model's embedding will have: a tokenizer with more tokens is refused.",
        metavar="N",
        at_least=1,
    )

    # Output
    output_prefix: str | None = _flag(
        "output",
        None,
        "beginning of the names of the files that are written; the folder is made where it is missing.",
        metavar="PREFIX",
    )
    overwrite_cache: bool = _flag(
        "output", False, "write anew, also where the output of the same inputs and options is there already."
    )
    dataset_impl: str = _flag("output", "mmap", "format of the output.", values=("mmap",))

    # Run
    workers: int = _flag("runtime", 1, "number of threads or processes that tokenize.", metavar="N", at_least=1)
    n_subs: int = _flag(
        "runtime",
        1,
        "work in so many parts, which are kept until all are done: the same command goes on after an interruption "
        "where it was. The result does not depend on it.",
        metavar="N",
        at_least=1,
    )
    log_interval: int = _flag(
        "runtime",
        100,
        "records between two lines of progress; there is at most one line a second. On a terminal a bar takes their "
        "place.",
        metavar="N",
        at_least=1,
    )
    debug: bool = _flag("runtime", False, "show tracebacks of errors (as MINDSPEED_DEBUG=1).")

    # Other commands
    check: bool = _flag(
        "other", False, "validate everything, the first records included, and print the plan; nothing is written."
    )
    merge_group_keys: tuple[str, ...] = _flag(
        "other",
        (),
        "join parts made by earlier runs: for each key, all pairs of files NAME_<key>.bin/.idx of the folder --input, "
        "in natural order of their names, become <prefix>_<key>.bin/.idx. E.g. text_document, or "
        "packed_input_ids_document packed_attention_mask_document packed_labels_document.",
        metavar="KEY",
    )
    inspect: str | None = _flag(
        "other",
        None,
        "show samples of an output as text, tokens that carry loss marked; the tokenizer is the one that the output "
        "was made with, unless one is given.",
        metavar="PREFIX",
    )
    num: int = _flag("other", 3, "with --inspect: number of samples.", metavar="N", at_least=1)
    html: str | None = _flag("other", None, "with --inspect: write a page instead.", metavar="FILE")
    whole: bool = _flag(
        "other", False, "with --inspect: show every token; else the middle of long stretches is left out, and counted."
    )

    given: frozenset[str] = frozenset()


FLAGS = {f"--{item.name.replace('_', '-')}": item for item in fields(Arguments) if item.name != "given"}
"""Flag -> field, in the order of `--help`."""


def flag_of(name: str) -> str:
    """The flag of a field."""
    return f"--{name.replace('_', '-')}"
