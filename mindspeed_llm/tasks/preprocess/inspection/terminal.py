"""Samples as lines of text: tokens that carry loss in colour on a terminal, between marks elsewhere."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TextIO

from mindspeed_llm.tasks.preprocess.inspection.decoding import Decoder, Piece
from mindspeed_llm.tasks.preprocess.inspection.facts import (
    FIRST_TOKEN,
    Facts,
    counted,
    left_out,
    sample_note,
    stream_facts,
    stream_warning,
)
from mindspeed_llm.tasks.preprocess.inspection.layout import Gap, Item, Limits, Run, SegmentStart, lay_out
from mindspeed_llm.tasks.preprocess.inspection.streams import LOSS, NO_LOSS, OTHER_TARGET, Sample, Stream
from mindspeed_llm.tasks.preprocess.inspection.visible import escaped, one_line, visible

_BOLD, _DIM, _UNDERLINE, _YELLOW = "1", "2", "4", "33"
_STATE_CODES: dict[int, tuple[str, ...]] = {NO_LOSS: (), LOSS: ("32",), OTHER_TARGET: ("35",)}  # green, magenta
_BAR_WIDTH = 30

Styled = tuple[str, tuple[str, ...]]
"""Text and the codes of its style."""


@dataclass(frozen=True)
class Symbols:
    """Marks around tokens with loss, and drawing characters."""

    opening: str
    closing: str
    target: str
    dots: str
    rule: str
    separator: str
    bar: str
    note: str


UNICODE = Symbols("⟦", "⟧", "⇒", "…", "──", "·", "█", "⟨{}⟩")
ASCII = Symbols("{+", "+}", "=>", "...", "--", "|", "#", "<{}>")


@dataclass(frozen=True)
class Look:
    """How text is written: with colours or marks, and with which symbols."""

    colour: bool = False
    symbols: Symbols = UNICODE

    @classmethod
    def of(cls, output: TextIO, environment: Mapping[str, str] = os.environ) -> "Look":
        """Colours on a terminal, unless NO_COLOR is set; ASCII where the encoding does not have the symbols."""
        terminal = output.isatty() and environment.get("TERM") != "dumb"
        try:
            "".join(vars(UNICODE).values()).encode(output.encoding or "ascii")
            symbols = UNICODE
        except UnicodeEncodeError:
            symbols = ASCII
        return cls(terminal and not environment.get("NO_COLOR"), symbols)

    def style(self, text: str, *codes: str) -> str:
        """The text in a style, where there are colours."""
        return f"\x1b[{';'.join(codes)}m{text}\x1b[0m" if self.colour and codes else text

    def rule(self, text: str) -> str:
        """A line that heads something."""
        return f"{self.symbols.rule} {text} {self.symbols.rule}"

    def shown(self, text: str) -> str:
        """Text of others on a line of ours."""
        return one_line(text, ascii_signs=self.symbols is ASCII)


def facts_lines(facts: Facts, look: Look) -> Iterator[str]:
    """The head of the output."""
    yield look.style(look.shown(f"{facts.title} ({facts.kind})"), _BOLD)
    for warning in facts.warnings:
        yield look.style(look.shown(f"  warning: {warning}"), _YELLOW)
    width = max((len(name) for name, _ in facts.rows), default=0)
    for name, value in facts.rows:
        yield f"  {look.style(name.ljust(width), _DIM)}  {look.shown(value)}"
    for reason, count, places in facts.skipped:
        where = f" (first at {places})" if places else ""
        yield look.shown(f"  {' ' * width}  {counted(count, 'record')} skipped: {reason}{where}")
    if facts.lengths:
        yield look.style("  lengths in tokens", _DIM)
        yield from _bars(facts.lengths, look)


def legend(kind: str, look: Look) -> Iterator[str]:
    """What the colours or marks mean."""
    if kind == "prompt":
        yield look.style("no token carries loss: these are prompts", _DIM)
        return
    text = _run([("text", _STATE_CODES[LOSS])], LOSS, look)
    yield f"{text} carries loss" + ("" if look.colour else ", all else does not")
    if kind == "pretrain":
        yield look.style(FIRST_TOKEN, _DIM)
    else:
        other = _run([(f"A{look.symbols.target}B", _STATE_CODES[OTHER_TARGET])], OTHER_TARGET, look)
        yield f"{other} token A stands here, token B is to be predicted"


def sample_lines(sample: Sample, decoder: Decoder, look: Look, limits: Limits | None) -> Iterator[str]:
    """One sample; the text of its tokens may hold line breaks."""
    separator = f" {look.symbols.separator} "
    title = f"sample {sample.index}"
    for number, stream in enumerate(sample.streams):
        names = [title if number == 0 else "", look.shown(stream.title)]
        yield look.style(look.rule(separator.join(filter(None, [*names, *stream_facts(stream)]))), _BOLD)
        if number == 0 and (note := sample_note(sample)):
            yield look.style(f"[{note}]", _DIM)
        if warning := stream_warning(stream):
            yield look.style(f"[{warning}]", _YELLOW)
        yield stream_text(stream, decoder, look, limits)


def stream_text(stream: Stream, decoder: Decoder, look: Look, limits: Limits | None) -> str:
    """The tokens of one sequence as text."""
    text = "" if len(stream.ids) else "(empty)"
    for item in lay_out(stream, decoder, limits):
        if isinstance(item, Run):
            text += _run_text(item, stream, decoder, look)
            continue
        line = look.style(_remark(item, stream, look), _DIM)
        # What is left out stays in the line, all else has a line of its own.
        text += (
            f" {line} " if isinstance(item, Gap) else ("" if text.endswith("\n") or not text else "\n") + f"{line}\n"
        )
    return text.removesuffix("\n")


def _remark(item: Item, stream: Stream, look: Look) -> str:
    dots = look.symbols.dots
    if isinstance(item, SegmentStart):
        again = ", its start is left out" if item.continued else ""
        loss = f", {item.num_targets:,} with loss" if stream.trained else ""
        return look.rule(f"{item.number} of {item.count}: {counted(item.num_tokens, 'token')}{loss}{again}")
    if isinstance(item, Gap):
        return f"[{dots} {left_out(item.num_tokens, item.num_targets)} {dots}]"
    assert not isinstance(item, Run)
    return f"[padding: {item.num_tokens:,} x {_token(item.piece, look)}]"


def _run_text(run: Run, stream: Stream, decoder: Decoder, look: Look) -> str:
    parts = [part for piece in run.pieces for part in _piece(piece, run.state, look)]
    if run.state == OTHER_TARGET:
        target = decoder.token(int(stream.labels[run.pieces[0].start]))
        parts += [(look.symbols.target, _STATE_CODES[run.state]), *_piece(target, run.state, look)]
    return _run(parts, run.state, look)


def _run(parts: list[Styled], state: int, look: Look) -> str:
    """Parts in their styles, or, without colours, between marks where the state has loss."""
    if look.colour:
        joined: list[Styled] = []
        for text, codes in parts:
            if joined and joined[-1][1] == codes:
                joined[-1] = (joined[-1][0] + text, codes)
            else:
                joined.append((text, codes))
        return "".join(look.style(text, *codes) for text, codes in joined)
    opening, closing = look.symbols.opening, look.symbols.closing
    text = "".join(text for text, _ in parts)
    for mark in (opening, closing):
        # Marks that stand in the data are no marks.
        text = text.replace(mark, escaped(mark))
    return text if state == NO_LOSS else f"{opening}{text}{closing}"


def _piece(piece: Piece, state: int, look: Look) -> Iterator[Styled]:
    codes = _STATE_CODES[state]
    if piece.kind != "text":
        yield _token(piece, look), (*codes, _UNDERLINE)
        return
    for kind, shown in visible(piece.text, ascii_signs=look.symbols is ASCII):
        yield shown, codes if kind == "text" else (*codes, _DIM)
        if kind in ("newline", "tab"):
            # Pagers end a style at the end of a line.
            yield {"newline": "\n", "tab": "\t"}[kind], ()


def _token(piece: Piece, look: Look) -> str:
    text = look.shown(piece.text)
    notes = {"unknown": text, "part": f"part of {text}"}
    return look.symbols.note.format(notes[piece.kind]) if piece.kind in notes else text


def _bars(lengths: list[tuple[str, int]], look: Look) -> Iterator[str]:
    most = max(count for _, count in lengths)
    name_width = max(len(name) for name, _ in lengths)
    count_width = max(len(f"{count:,}") for _, count in lengths)
    for name, count in lengths:
        bar = look.symbols.bar * (-(-count * _BAR_WIDTH // most) if count else 0)
        yield f"    {name:>{name_width}}  {count:>{count_width},}  {look.style(bar, '36')}"
