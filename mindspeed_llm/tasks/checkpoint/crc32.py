"""CRC-32 (zlib's) of parts that are read in any order, put together to that of the whole.

A CRC is the remainder of a polynomial over the two-element field. Appending n bytes multiplies it by x^(8n), modulo the
CRC's polynomial; so the CRC of a whole follows from those of its parts and their lengths.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable
from functools import lru_cache

_READ_BYTES = 2**19
"""Small enough to stay in a core's cache between being read and being summed up."""
_POLYNOMIAL = 0xEDB88320  # bits reversed, as everywhere here: the highest bit is x^0
_ONE = 1 << 31


def joined(parts: Iterable[tuple[int, int]]) -> int:
    """The CRC of consecutive parts, of which each is (CRC, number of bytes)."""
    total = 0
    for crc, nbytes in parts:
        total = _product(_power(nbytes), total) ^ crc
    return total


def of_range(descriptor: int, start: int, stop: int) -> int:
    """The CRC-32 of a range of a file."""
    crc = 0
    while start < stop:
        content = os.pread(descriptor, min(stop - start, _READ_BYTES), start)
        if not content:
            raise OSError("a file has become shorter while it was being read")
        crc = zlib.crc32(content, crc)
        start += len(content)
    return crc


def _product(a: int, b: int) -> int:
    """The product of two polynomials, modulo the CRC's."""
    result = 0
    while a:
        if a & _ONE:
            result ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = b >> 1 ^ _POLYNOMIAL if b & 1 else b >> 1
    return result


@lru_cache(maxsize=4096)
def _power(nbytes: int) -> int:
    """x^(8 * nbytes). The lengths of parts repeat: most are slabs of tensors of one size."""
    result, factor = _ONE, _ONE >> 8
    while nbytes:
        if nbytes & 1:
            result = _product(factor, result)
        factor = _product(factor, factor)
        nbytes >>= 1
    return result
