"""Samples spelled out piece by piece, to compare work with: no renderer of ours is involved."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from mindspeed_llm.tasks.preprocess.chunks import Chunk
from mindspeed_llm.tasks.preprocess.handlers import WorkOptions, find_handler, make_work
from mindspeed_llm.tasks.preprocess.readers import Record
from tests.support.tokenizer_files import byte_level_bpe

IGNORED = -100
SPECIALS = (
    "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<|startoftext|>", "<|extra_4|>", "<|extra_0|>", "<|eos|>", "<reserved_106>", "<reserved_107>",
    "<｜User｜>", "<｜Assistant｜>",
)  # fmt: skip


def bpe_tokenizer(
    *, bos: str | None = "<s>", eos: str | None = "</s>", pad: str | None = None, chat_template: str | None = None
) -> PreTrainedTokenizerFast:
    """A byte-level BPE with merges, so that it matters where pieces of text are cut, and the markers of templates."""
    named = list(dict.fromkeys(token for token in (bos, eos, pad) if token))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_level_bpe(*named, *SPECIALS), bos_token=bos, eos_token=eos, pad_token=pad
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def R(text: str) -> tuple[str, bool]:
    """A piece that carries loss: of a reply."""
    return text, True


def spelled(tokenizer: Any, pieces: Sequence[str | tuple[str, bool]]) -> tuple[list[int], list[int]]:
    """(ids, labels) of pieces, each encoded by transformers on its own; plain strings carry no loss."""
    ids: list[int] = []
    labels: list[int] = []
    for piece in pieces:
        text, has_loss = piece if isinstance(piece, tuple) else (piece, False)
        encoded = tokenizer.encode(text, add_special_tokens=False)
        ids += encoded
        labels += encoded if has_loss else [IGNORED] * len(encoded)
    return ids, labels


def text_of(pieces: Sequence[str | tuple[str, bool]]) -> str:
    """The text of pieces."""
    return "".join(piece if isinstance(piece, str) else piece[0] for piece in pieces)


def run(name: str, tokenizer: Any, *records: dict[str, Any], **options: Any) -> Chunk:
    """What the handler makes of the records, which stand in data.jsonl from line 1 on."""
    work = make_work(find_handler(name), tokenizer, WorkOptions(**options))
    chunk = work([Record(Path("data.jsonl"), line, data) for line, data in enumerate(records, start=1)])
    assert tuple(chunk.arrays) == tuple(chunk.lengths) == work.keys
    assert chunk.num_records == len(records)
    return chunk


def sequences(chunk: Chunk, key: str) -> list[list[int]]:
    """The sequences of a key."""
    ends = chunk.lengths[key].cumsum()
    assert len(chunk.arrays[key]) == (ends[-1] if len(ends) else 0)
    starts = [0, *ends[:-1].tolist()]
    return [chunk.arrays[key][start:end].tolist() for start, end in zip(starts, ends.tolist(), strict=True)]
