"""Numbers as people read them: the same in the terminal, Markdown, HTML and plots."""

from __future__ import annotations

__all__ = [
    "accuracy",
    "bits_name",
    "bytes_short",
    "duration",
    "nodes_name",
    "percent",
    "points",
    "speed",
    "times",
]

MISSING = "–"


def speed(value: float | None) -> str:
    """Images per second to three digits, such as '1,340' or '28.1'."""
    if value is None:
        return MISSING
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def times(value: float | None) -> str:
    """A factor, such as '1.87×'; two decimals below 10, then one."""
    if value is None:
        return MISSING
    return f"{value:.2f}×" if value < 9.95 else f"{value:.1f}×"


def percent(value: float | None) -> str:
    """A share of 1 as whole per cent; below 1 % with a decimal."""
    if value is None:
        return MISSING
    return f"{100 * value:.1f}%" if 0 < value < 0.00995 else f"{100 * value:.0f}%"


def accuracy(value: float | None) -> str:
    """An accuracy of 0..1 as per cent with two decimals: differences of 0.1 points matter."""
    return MISSING if value is None else f"{100 * value:.2f}%"


def bytes_short(value: float | None) -> str:
    """Bytes to three digits with a decimal unit (1 MB = 10^6 bytes), such as '428 kB'."""
    if value is None:
        return MISSING
    units = ["B", "kB", "MB", "GB", "TB", "PB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        del units[0]
    digits = 0 if units[0] == "B" or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:,.{digits}f} {units[0]}"


def duration(seconds: float) -> str:
    """Seconds as '42 s', '3 min 05 s' or '2 h 10 min'."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def points(difference: float) -> str:
    """A difference of accuracies of 0..1 in percentage points, such as '−0.08 points'."""
    text = f"{100 * difference:+.2f}"
    return ("±0.00" if text in {"+0.00", "-0.00"} else text.replace("-", "−")) + " points"


def bits_name(bits: int) -> str:
    """'fp32' for plain float32, else '4 bit'."""
    return "fp32" if bits == 32 else f"{bits} bit"


def nodes_name(nodes: int) -> str:
    """'1 node', '2 nodes'."""
    return "1 node" if nodes == 1 else f"{nodes} nodes"
