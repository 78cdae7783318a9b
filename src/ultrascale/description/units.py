"""Numbers with units: parses user input and formats output. All unit names are defined here.

Inside the program everything is bytes, seconds, FLOPs and tokens; `GiB` is 2^30 bytes and `GB` 10^9, `4M` tokens are 4,000,000
and `4Mi` are 4 x 2^20. A sequence length of `128k` is 131,072, by convention.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import cache

TOKENS = {
    "": 1, "k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40,
}  # fmt: skip
LENGTHS = {"": 1, "k": 2**10, "K": 2**10, "Ki": 2**10, "M": 2**20, "Mi": 2**20}
BYTES = {
    "": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip
EXPECTED_BYTES = "bytes, such as 20GiB, 16GB or 16000000000"
DAYS_OF_A_YEAR = 365
SECONDS = {"d": 86400, "h": 3600, "m": 60, "min": 60, "s": 1}
EXPECTED_SECONDS = "a time with units, such as 24h, 1d12h or 90m"
EXPECTED = "tokens, such as 4M, 69B, 4Mi or 4194304"
_NUMBER = re.compile(r"\s*((?:\d{1,3}(?:,\d{3})+|\d[\d_]*)(?:\.\d+)?(?:[eE][+-]?\d+)?|\.\d+)\s*(.*?)\s*")
"""A number and its unit; commas stand between thousands only, so that `1024,2048` is not read as 10,242,048."""


class UnitError(ValueError):
    """A quantity that cannot be parsed; the message names what was expected."""


def parse_tokens(text: str) -> int:
    """Number of tokens: `4M`, `69B`, `1.5T`, `4Mi`, `4194304`, `4_194_304`. Raises UnitError."""
    return _whole(text, TOKENS, EXPECTED, "tokens")


def parse_length(text: str) -> int:
    """Sequence length in tokens: `8192`, `8k`, `128k`, `1M`, where k is 1024, as usual for context lengths. Raises
    UnitError."""
    return _whole(text, LENGTHS, "the length of a sequence, such as 8192, 8k or 128k", "tokens")


def parse_count(text: str) -> int:
    """Number of steps: `300`, `10k`, `1.5M`. Raises UnitError."""
    return _whole(text, TOKENS, "a number, such as 300 or 10k", "steps")


def parse_bytes(text: str) -> int:
    """Number of bytes: `20GiB` (binary), `16 GB` (decimal), `16e9`, `16000000000`. Raises UnitError."""
    return _whole(text, BYTES, EXPECTED_BYTES, "bytes")


def parse_seconds(text: str) -> int:
    """Duration in seconds: `24h`, `1d12h`, `90m`, `1h30m`, `45s`; a number without a unit is an error. Raises UnitError."""
    parts = re.findall(r"(\d{1,9})\s*([a-z]+)", text.strip())
    is_complete = "".join(f"{number}{unit}" for number, unit in parts) == re.sub(r"\s", "", text)
    if not parts or not is_complete or any(unit not in SECONDS for _, unit in parts):
        reason = "which has no unit" if re.fullmatch(r"[\d.]+", text.strip()) else "which is none"
        raise UnitError(f"expected {EXPECTED_SECONDS}, found {text!r}, {reason}")
    if not (seconds := sum(int(number) * SECONDS[unit] for number, unit in parts)):
        raise UnitError(f"expected {EXPECTED_SECONDS}, found {text!r}, which is no time at all")
    return seconds


def _whole(text: str, units: dict[str, int], expected: str, what: str) -> int:
    match = _NUMBER.fullmatch(text)
    if match is None or match[2] not in units:
        several = "; this is one number, with commas between thousands only" if "," in text else ""
        raise UnitError(f"expected {expected}, found {text!r}{several}")
    value = float(match[1].replace("_", "").replace(",", "")) * units[match[2]]
    if not math.isfinite(value):
        raise UnitError(f"expected {expected}, found {text!r}, which is too large")
    if abs(value - round(value)) > 1e-12 * max(1.0, value):
        raise UnitError(f"expected a whole number of {what}, found {text!r} = {value}")
    return round(value)


@cache
def divisors(number: int) -> tuple[int, ...]:
    """Divisors in ascending order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))


def format_bytes(value: float) -> str:
    """`17.0 GiB`: binary units, three figures."""
    return _scaled(value, ("B", "KiB", "MiB", "GiB", "TiB"), 2**10)


def format_bytes_per_second(value: float) -> str:
    """`450 GB/s`: decimal units, as vendors print bandwidth."""
    return _scaled(value, ("B/s", "kB/s", "MB/s", "GB/s", "TB/s"))


def format_flops_per_second(value: float) -> str:
    """`989 TFLOP/s`."""
    return _scaled(value, ("FLOP/s", "kFLOP/s", "MFLOP/s", "GFLOP/s", "TFLOP/s", "PFLOP/s"))


def format_count(value: float) -> str:
    """`8.03B`, `4.19M`, `512`: parameters and tokens."""
    return _scaled(value, ("", "k", "M", "B", "T"), space="")


def format_hours(value: float) -> str:
    """`4,999`, `0.0441`: hours of GPUs, three figures at least."""
    return f"{value:,.0f}" if value >= 100 else _three_figures(value) if value else "0"


def count_of(number: int, what: str) -> str:
    """`1 rank`, `2 ranks`, `1,024 processes`."""
    plural = f"{what}es" if what.endswith(("s", "ch")) else f"{what}s"
    return f"{number:,} {what if number == 1 else plural}"


def first_few(words: Sequence[str], most: int) -> str:
    """`a, b`, or `a, b and 3 more`."""
    more = f" and {len(words) - most:,} more" if len(words) > most else ""
    return ", ".join(words[:most]) + more


def format_share(value: float | None) -> str:
    """A fraction of a peak, `41.2%`. `>100%` if it is above 100%, or None for that reason: the peak is then wrong."""
    return ">100%" if value is None or value > 1 else f"{value:.1%}"


def format_percent(value: float | None) -> str:
    """A difference in percent: `+1.25%`, `equal`, `-<0.01%`; empty for None."""
    if value is None or value == 0:
        return "" if value is None else "equal"
    return f"{value:+.2f}%" if abs(value) >= 0.005 else f"{'-' if value < 0 else '+'}<0.01%"


def format_seconds(value: float) -> str:
    """`12.3 ms`, `4.56 s`, `1h02m`, `3d04h`; from two years on `5.3 years`."""
    if value < 60:
        return _scaled(value, ("us", "ms", "s"), smallest=1e-6)
    seconds = round(value)
    days, hours, minutes = seconds // 86400, seconds % 86400 // 3600, seconds % 3600 // 60
    if days >= 2 * DAYS_OF_A_YEAR:
        return f"{days / DAYS_OF_A_YEAR:,.1f} years"
    if days:
        return f"{days}d{hours:02d}h"
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds % 60:02d}s"


def _scaled(value: float, units: Sequence[str], base: int = 1000, *, smallest: float = 1, space: str = " ") -> str:
    """`value` in the largest of `units` of which it has one; each is `base` times the one before, the first `smallest`."""
    sizes = [(smallest * base**power, unit) for power, unit in enumerate(units)]
    # 999.5 of a unit would otherwise print as 1000.
    size, unit = next((pair for pair in reversed(sizes) if abs(value) >= pair[0] * 0.9995), sizes[0])
    return f"{_three_figures(value / size)}{space}{unit}"


def _three_figures(value: float) -> str:
    if value == int(value) and abs(value) < 1000:
        return str(int(value))
    rounded = float(f"{value:.3g}")  # 0.9999 has the decimals of 1.00
    return f"{rounded:.{max(0, 2 - math.floor(math.log10(abs(rounded))))}f}"
