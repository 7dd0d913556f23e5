"""Split strings such as "98,1,1": the documents of a file, in order, cut into train, valid and test."""

import itertools
import math

import numpy as np

from mindspeed_llm.errors import UserError

NUM_SPLITS = 3


def parse_split(split: str) -> tuple[float, float, float]:
    """The three numbers of a split string; those that are left out are 0.

    Raises UserError where an item is no number from 0 on, or where there are more than three.
    """
    try:
        numbers = [float(item) for item in split.split(",")]
    except ValueError:
        numbers = [-1.0]
    if len(numbers) > NUM_SPLITS or not all(0 <= number < math.inf for number in numbers):
        raise UserError(
            f"split {split!r} is not a list of up to three numbers from 0 on, such as 98,1,1 (train, valid, test)"
        )
    first, second, third = numbers + [0.0] * (NUM_SPLITS - len(numbers))
    return first, second, third


def split_documents(num_documents: int, split: str) -> list[range]:
    """Cut the documents into train, valid and test; a range each, empty where the share is 0 or rounds to nothing.

    The edges are those of megatron-core: shares are added up in double precision, and their product with the number of
    documents is rounded to the nearest whole number, halves to even ones. Raises UserError where all shares are 0.
    """
    shares = np.array(parse_split(split))
    if not shares.any():
        raise UserError(f"split {split!r} gives every part 0; at least one number must be larger")
    bounds = [0.0, *np.cumsum(shares / shares.sum()).tolist()]
    edges = [round(bound * float(num_documents)) for bound in bounds]
    return [range(start, stop) for start, stop in itertools.pairwise(edges)]
