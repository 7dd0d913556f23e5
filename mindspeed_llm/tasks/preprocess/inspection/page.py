"""Samples as one page of HTML that needs nothing else: tokens that carry loss on a coloured ground."""

import base64
import hashlib
from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path

from mindspeed_llm.errors import UserError
from mindspeed_llm.files import write_durably
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
from mindspeed_llm.tasks.preprocess.inspection.page_style import SCRIPT, STYLE, WITHOUT_SCRIPT
from mindspeed_llm.tasks.preprocess.inspection.streams import NO_LOSS, OTHER_TARGET, Sample, Stream, loss_profile
from mindspeed_llm.tasks.preprocess.inspection.visible import one_line, visible

_STRIP_CELLS = 240


def write_page(
    file: str | Path, facts: Facts, samples: Iterable[Sample], count: int, decoder: Decoder, limits: Limits | None
) -> None:
    """Write the page under a temporary name and rename it. `samples` are the first `count` of the data set, read one
    at a time. Raises UserError where the file cannot be written.
    """
    target = Path(file)
    if target.is_dir():
        raise UserError(f"--html {target} is a folder; name a file")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_durably(target, page(facts, samples, count, decoder, limits), through_links=True)
    except OSError as error:
        raise UserError(f"--html {target} cannot be written: {error}") from error


def page(facts: Facts, samples: Iterable[Sample], count: int, decoder: Decoder, limits: Limits | None) -> Iterator[str]:
    """The page in parts. Nothing of the data can act in it: all of it is escaped, and only our script may run."""
    script_hash = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{script_hash}'"
    title = _line(facts.title)
    yield (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n<noscript><style>{WITHOUT_SCRIPT}</style></noscript>\n"
        f"</head>\n<body>\n"
    )
    yield from _header(facts)
    yield from _top(facts.kind, count)
    yield "<main>\n"
    for sample in samples:
        yield from _sample(sample, count, decoder, limits)
    yield "</main>\n"
    yield "<footer>Point at a token to see its place, its id and its label.</footer>\n"
    yield f'<div id="tip"></div>\n<script>{SCRIPT}</script>\n</body>\n</html>\n'


def _header(facts: Facts) -> Iterator[str]:
    yield f"<header>\n<h1>{_line(facts.title)} <small>{_line(facts.kind)}</small></h1>\n"
    for warning in facts.warnings:
        yield f'<p class="warning">{_line(warning)}</p>\n'
    yield '<div class="facts">\n<dl>\n'
    for name, value in facts.rows:
        yield f"<dt>{_line(name)}</dt><dd>{_line(value)}</dd>\n"
    for reason, count, places in facts.skipped:
        where = f" (first at {places})" if places else ""
        yield f'<dd class="skipped">{counted(count, "record")} skipped: {_line(reason)}{_line(where)}</dd>\n'
    yield "</dl>\n"
    if facts.lengths:
        most = max(count for _, count in facts.lengths)
        yield '<table class="lengths"><caption>lengths in tokens</caption>\n'
        for name, count in facts.lengths:
            bar = f'<span class="bar" style="width:{100 * count / most:.1f}%"></span>' if count else ""
            yield f"<tr><th>{_line(name)}</th><td>{count:,}</td><td>{bar}</td></tr>\n"
        yield "</table>\n"
    yield "</div>\n</header>\n"


def _top(kind: str, count: int) -> Iterator[str]:
    if kind == "prompt":
        legend = "<span>no token carries loss: these are prompts</span>"
    else:
        legend = '<span><mark>text</mark> carries loss</span><span><span class="c">text</span> does not</span>'
    if kind in ("instruction", "pairwise"):
        legend += '<span><mark class="other">A<b>⇒B</b></mark> token A stands here, token B is to be predicted</span>'
    elif kind == "pretrain":
        legend += f"<span>{FIRST_TOKEN}</span>"
    links = "".join(f'<a href="#s{number}">{number}</a>' for number in range(count))
    yield f'<div class="top"><div><div class="legend">{legend}</div>'
    yield f'<nav aria-label="samples">{links}</nav></div></div>\n'


def _sample(sample: Sample, count: int, decoder: Decoder, limits: Limits | None) -> Iterator[str]:
    number = sample.index
    yield f'<section id="s{number}">\n'
    links = [
        f'<a href="#s{other}">{word}</a>'
        for other, word in ((number - 1, "previous"), (number + 1, "next"))
        if 0 <= other < count
    ]
    turn = f'<span class="turn">{" · ".join(links)}</span>' if links else ""
    single = len(sample.streams) == 1 and not sample.streams[0].title
    if single:
        figures = " · ".join(stream_facts(sample.streams[0]))
    else:
        figures = sample_note(sample) or ""
    yield f'<div class="head"><h2>sample {number}</h2><span class="figures">{figures}</span>{turn}</div>\n'
    for stream in sample.streams:
        if not single:
            figures = " · ".join(stream_facts(stream))
            yield f'<div class="head"><h3>{_line(stream.title)}</h3><span class="figures">{figures}</span></div>\n'
        yield from _stream(stream, decoder, limits)
    yield "</section>\n"


def _stream(stream: Stream, decoder: Decoder, limits: Limits | None) -> Iterator[str]:
    if stream.trained:
        yield _strip(stream)
    yield '<div class="tokens">'
    if warning := stream_warning(stream):
        yield f'<span class="warning">{warning}</span>\n'
    if not len(stream.ids):
        yield '<span class="padding">(empty)</span>'
    for item in lay_out(stream, decoder, limits):
        yield _item(item, stream, decoder)
    yield "</div>\n"


def _strip(stream: Stream) -> str:
    """Where in the sequence the loss is, on one line over its whole length."""
    profile = loss_profile(stream, _STRIP_CELLS)
    cells = "".join(
        f'<rect x="{cell}" width="1" height="1" opacity="{share:.2g}"/>' for cell, share in enumerate(profile) if share
    )
    return (
        f'<svg class="strip" viewBox="0 0 {max(len(profile), 1)} 1" preserveAspectRatio="none" role="img" '
        f'aria-label="where the loss is" shape-rendering="crispEdges">{cells}</svg>\n'
    )


def _item(item: Item, stream: Stream, decoder: Decoder) -> str:
    if isinstance(item, Run):
        return _run(item, stream, decoder)
    if isinstance(item, SegmentStart):
        again = ", its start is left out" if item.continued else ""
        loss = f", {item.num_targets:,} with loss" if stream.trained else ""
        text = f"{item.number} of {item.count}: {counted(item.num_tokens, 'token')}{loss}{again}"
        return f'<span class="part">{text}</span>'
    if isinstance(item, Gap):
        return f'<span class="left-out">… {left_out(item.num_tokens, item.num_targets)} …</span>'
    return f'<span class="padding">padding: {item.num_tokens:,} × {_line(item.piece.text)}</span>'


def _run(run: Run, stream: Stream, decoder: Decoder) -> str:
    tokens = "".join(_token(piece, run, stream, decoder) for piece in run.pieces)
    if run.state == NO_LOSS:
        return tokens
    if run.state == OTHER_TARGET:
        target = decoder.token(int(stream.labels[run.pieces[0].start]))
        return f'<mark class="other">{tokens}<b>⇒{_line(target.text)}</b></mark>'
    return f"<mark>{tokens}</mark>"


def _token(piece: Piece, run: Run, stream: Stream, decoder: Decoder) -> str:
    ids = ", ".join(map(str, stream.ids[piece.start : piece.stop].tolist()))
    several = piece.stop - piece.start > 1
    tip = f"tokens {piece.start} to {piece.stop - 1}: ids {ids}" if several else f"token {piece.start}: id {ids}"
    if run.state == OTHER_TARGET:
        label = int(stream.labels[piece.start])
        tip += f"\nto be predicted here: {one_line(decoder.token(label).text)} (id {label})"
    elif stream.trained:
        tip += "\nno loss" if run.state == NO_LOSS else "\ncarries loss"
    kind = {"text": "t", "special": "t s", "unknown": "t unknown", "part": "t part-of"}[piece.kind]
    return f'<span class="{kind}" data-tip="{escape(tip)}">{_text(piece)}</span>'


def _text(piece: Piece) -> str:
    if piece.kind != "text":
        notes = {"unknown": "⟨{}⟩", "part": "<i>⟨part of {}⟩</i>"}
        return notes.get(piece.kind, "{}").format(_line(piece.text))
    after = {"newline": "\n", "tab": "\t"}
    return "".join(
        escape(shown) if kind == "text" else f"<i>{escape(shown)}</i>{after.get(kind, '')}"
        for kind, shown in visible(piece.text)
    )


def _line(text: str) -> str:
    """Text of others on a line of ours, escaped."""
    return escape(one_line(text))
