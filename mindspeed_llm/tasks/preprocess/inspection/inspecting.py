"""Show what a data set holds, on the terminal or as a page."""

import sys
from pathlib import Path
from typing import Any

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.inspection.data_set import DataSet
from mindspeed_llm.tasks.preprocess.inspection.decoding import Decoder
from mindspeed_llm.tasks.preprocess.inspection.facts import gather_facts
from mindspeed_llm.tasks.preprocess.inspection.layout import Limits
from mindspeed_llm.tasks.preprocess.inspection.locating import locate
from mindspeed_llm.tasks.preprocess.inspection.page import write_page
from mindspeed_llm.tasks.preprocess.inspection.terminal import Look, facts_lines, legend, sample_lines
from mindspeed_llm.tasks.preprocess.inspection.tokenizer import find_tokenizer

TERMINAL_LIMITS = Limits(total=1000, head=180, tail=80)
PAGE_LIMITS = Limits(total=8000, head=700, tail=300)


def inspect_prefix(
    prefix: str | Path,
    *,
    num: int = 3,
    html: str | Path | None = None,
    tokenizer: Any | None = None,
    shorten: bool = True,
) -> None:
    """Print the first `num` samples of a data set with the tokens that carry loss marked, or write them as a page.

    Args:
        prefix: the output prefix of the preprocessing command, or any of its files.
        num: number of samples, from the first; all where there are fewer.
        html: file of the page; None prints to standard output.
        tokenizer: decodes the ids (one of this package or of transformers); None loads the one of the summary.
        shorten: leave out the middle of long runs, and say how much; False shows every token.

    Raises UserError: no such data set, more than one, damaged files, no tokenizer, `num` below 1.
    """
    if num < 1:
        raise UserError(f"--num {num}: expected the number of samples to show, 1 or more")
    location = locate(prefix)
    tokenizer, warning = find_tokenizer(location, tokenizer)
    padding_ids = frozenset(i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None)
    data_set = DataSet(location, padding_ids)
    facts, decoder = gather_facts(data_set, warning), Decoder(tokenizer)
    count = min(num, len(data_set))
    samples = (data_set[index] for index in range(count))
    if html is not None:
        write_page(html, facts, samples, count, decoder, PAGE_LIMITS if shorten else None)
        _print(f"{html}: {count} of {len(data_set):,} samples of {location.prefix}")
        return
    look = Look.of(sys.stdout)
    _print(*facts_lines(facts, look), "", *legend(facts.kind, look))
    for sample in samples:
        _print("", *sample_lines(sample, decoder, look, TERMINAL_LIMITS if shorten else None))
    if count < num:
        _print("", f"the data set holds no more than {count} samples" if count else "the data set holds no samples")


def _print(*lines: str) -> None:
    """Print lines; characters that the encoding of the output does not have are written as escapes."""
    encoding = sys.stdout.encoding or "utf-8"
    for line in lines:
        print(line.encode(encoding, "backslashreplace").decode(encoding))
