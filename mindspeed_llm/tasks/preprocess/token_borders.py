"""Which tokens of a text lie in a span of its characters."""

import bisect
from collections.abc import Callable

from mindspeed_llm.tasks.preprocess.tokenizers import Tokenizer


def token_borders(tokenizer: Tokenizer, text: str) -> tuple[list[int], Callable[[int], int], Callable[[int], int]]:
    """Ids of the text; the first token that reaches beyond a character; the first that does not begin before one.

    A token that holds text of both prompt and reply, such as " then" in "ASSISTANT: then", belongs to the reply.
    """
    encoded = tokenizer.encode_with_offsets(text)
    if encoded is not None:
        ids, offsets = encoded
        starts, ends = [start for start, _ in offsets], [end for _, end in offsets]

        def behind(character: int) -> int:
            return bisect.bisect_right(ends, character)

        # Offsets may leave white space out, so that a token of white space has no width.
        return list(ids), behind, lambda character: max(bisect.bisect_left(starts, character), behind(character))
    ids = list(tokenizer.encode(text, add_special_tokens=False))

    def common(character: int) -> tuple[int, bool]:
        # Without offsets: the tokens that the text up to the character and the whole text have in common.
        front = tokenizer.encode(text[:character], add_special_tokens=False)
        num = next((i for i, (a, b) in enumerate(zip(front, ids, strict=False)) if a != b), min(len(front), len(ids)))
        return num, num < min(len(front), len(ids))

    def token_behind(character: int) -> int:
        num, is_straddled = common(character)
        return num + is_straddled

    return ids, lambda character: common(character)[0], token_behind
