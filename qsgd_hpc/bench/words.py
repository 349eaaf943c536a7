"""Parsing of sizes and bits, formatting of numbers: pure."""

from __future__ import annotations

import re
from typing import Any

from qsgd_hpc.compression import has_choice_of_bits
from qsgd_hpc.errors import UsageError

__all__ = ["parse_bits", "parse_sizes", "parse_specs", "rate_text", "size_text", "time_text"]

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
STEP = 4  # between the sizes of a range
MOST_BYTES = 1 << 34
PLAIN_BITS = 32
FLOAT_BYTES = 4
AUTO = "auto"
TOP_K = 8  # of each bucket of 512: 1.6 %


def _size_bytes(word: str) -> int:
    found = re.fullmatch(r"(\d+)([KMG]?)(?:i?B)?", word.strip(), re.IGNORECASE)
    if found is None:
        raise UsageError(f"size {word!r}: expected a number with K, M or G, such as 64K or 100M")
    size = int(found[1]) * UNITS[found[2].upper()]
    if size < 4 or size % 4:
        raise UsageError(f"size {word!r}: expected a multiple of 4 bytes, the size of a float32")
    if size > MOST_BYTES:
        raise UsageError(f"size {word!r}: at most {size_text(MOST_BYTES)}")
    return size


def parse_sizes(text: str) -> list[int]:
    """Parse ``4K:256M``, ``4K:256M:2`` (factor 2 instead of 4) or ``64K,1M``; return bytes.

    A range includes its upper end even if no power of the factor leads to it.

    Raises:
        UsageError: the text is none of these.
    """
    if ":" not in text:
        return sorted({_size_bytes(word) for word in text.split(",")})
    ends, factor = text.split(":"), STEP
    if len(ends) == 3:
        if not ends[2].isdecimal() or int(ends[2]) < 2:
            raise UsageError(f"--sizes {text}: the factor {ends[2]!r} must be at least 2")
        factor = int(ends.pop())
    if len(ends) != 2:
        raise UsageError(f"--sizes {text}: expected FROM:TO, FROM:TO:FACTOR, or sizes with commas")
    size, last = _size_bytes(ends[0]), _size_bytes(ends[1])
    if size > last:
        raise UsageError(f"--sizes {text}: {ends[0]} is larger than {ends[1]}; swap them")
    sizes = []
    while size < last:
        sizes.append(size)
        size *= factor
    return [*sizes, last]


def parse_bits(text: str, *, codes_only: bool = False) -> list[int | str]:
    """Parse ``32,8,auto``: bits per element, 32 for plain float32, auto for the planner's choice.

    Raises:
        UsageError: any other text, or any but 1 to 8 with ``codes_only``.
    """
    found: list[int | str] = []
    for word in text.split(","):
        is_code = word.isdecimal() and 1 <= int(word) <= 8
        if not is_code and (codes_only or word not in (str(PLAIN_BITS), AUTO)):
            more = "" if codes_only else ", 32 (plain float32) or auto (the planner's choice)"
            raise UsageError(f"--bits {text}: {word!r} is not 1 to 8{more}")
        value = word if word == AUTO else int(word)
        if value not in found:
            found.append(value)
    return found


def parse_specs(schemes: str, bits: str, norms: str) -> list[dict[str, Any]]:
    """Return the keyword arguments of the CodecSpecs for comma-separated names.

    Raises:
        UsageError: bits out of range. Unknown schemes and norms are left to the core.
    """
    widths = parse_bits(bits, codes_only=True)
    found: list[dict[str, Any]] = []
    for scheme in schemes.split(","):
        if not has_choice_of_bits(scheme):
            found.append({"scheme": scheme, **({"k": TOP_K} if scheme == "topk" else {})})
            continue
        for width in widths:
            if scheme == "qsgd" and width == 1:
                found.append({"scheme": "sign"})
            elif scheme == "qsgd":
                found += [{"scheme": scheme, "bits": width, "norm": n} for n in norms.split(",")]
            else:
                found.append({"scheme": scheme, "bits": width})
    return found


def size_text(size_bytes: float) -> str:
    """Return ``64 K`` or ``1.07 K``: three digits, or four for 1000 to 1023."""
    for unit in ("", "K", "M", "G"):
        if size_bytes < 1024 or unit == "G":
            digits = 4 if size_bytes >= 1000 else 3
            return f"{size_bytes:.{digits}g} {unit}".strip()
        size_bytes /= 1024
    raise AssertionError("the last unit returns")


def time_text(seconds: float) -> str:
    """Return a time with three digits and its unit."""
    for unit, scale in (("us", 1e6), ("ms", 1e3)):
        if seconds * scale < 999.5:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds:.3g} s"


def rate_text(gb_per_s: float) -> str:
    """Return GB/s with three digits, without an exponent."""
    digits = 3 if gb_per_s < 1 else 2 if gb_per_s < 10 else 1
    return f"{gb_per_s:.{digits}f}"
