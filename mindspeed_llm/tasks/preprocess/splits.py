"""Split strings such as "98,1,1": the documents of a file, in order, cut into train, valid and test."""

import itertools
import math

from mindspeed_llm.errors import UserError

NUM_SPLITS = 3


def parse_split(split: str, setting: str = "split") -> tuple[float, float, float]:
    """The three numbers of a split string; those that are left out are 0. `setting` is what people call it.

    Raises UserError where an item is no number from 0 on, or where there are more than three.
    """
    try:
        numbers = [float(item) for item in split.split(",")]
    except ValueError:
        numbers = [-1.0]
    if len(numbers) > NUM_SPLITS or not all(0 <= number < math.inf for number in numbers):
        raise UserError(
            f"{setting} = {split!r} is not a list of up to three numbers from 0 on, such as 95,5,0 (training, "
            "evaluation, test)"
        )
    first, second, third = numbers + [0.0] * (NUM_SPLITS - len(numbers))
    return first, second, third


def split_documents(num_documents: int, split: str, setting: str = "split") -> list[range]:
    """Cut the documents into train, valid and test; a range each, empty where the share is 0 or rounds to nothing.

    The edges are those of megatron-core: shares are added up in double precision, and their product with the number of
    documents is rounded to the nearest whole number, halves to even ones. Raises UserError where all shares are 0.
    """
    first, second, third = parse_split(split, setting)
    # Not `sum`, which Python rounds otherwise from 3.12 on.
    total = first + second + third
    if total == 0:
        raise UserError(f"{setting} = {split!r} gives every part 0; at least one number must be larger")
    bounds = itertools.accumulate([0.0, first / total, second / total, third / total])
    edges = [round(bound * float(num_documents)) for bound in bounds]
    return [range(start, stop) for start, stop in itertools.pairwise(edges)]
