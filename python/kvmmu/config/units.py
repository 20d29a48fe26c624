"""Sizes, shares and durations, as people write them.

What lives here: what "128MB", "25%" and "200us" mean, as types for fields of settings. What never
lives here: settings.

MB is 2**20 bytes, as MiB is, and likewise K, G and T: these are sizes of memory, pages are powers
of two, and the "128MB" page that people write is one of 2**27 bytes. Sizes are printed as MiB, so
that nobody has to guess. A number without a unit is bytes (:data:`Bytes`), seconds
(:data:`Seconds`) or microseconds (:data:`Microseconds`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer

from .files import Allowed

__all__ = [
    "Bytes",
    "Microseconds",
    "Seconds",
    "Share",
    "parse_bytes",
    "parse_seconds",
    "parse_share",
    "show_bytes",
]

_QUANTITY = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,12})?)\s*([A-Za-zµ%]*)")
_BYTES = {
    "B": 1,
    **{
        f"{letter}{end}": 1 << shift
        for shift, letter in ((10, "K"), (20, "M"), (30, "G"), (40, "T"))
        for end in ("", "B", "iB")
    },
    "kB": 1 << 10,
}
_NANOSECONDS = {
    "ns": 1,
    "us": 10**3,
    "µs": 10**3,
    "ms": 10**6,
    "s": 10**9,
    "min": 60 * 10**9,
    "h": 3600 * 10**9,
}
_BYTES_ALLOWED = "a size such as 128MiB or 134217728 (K, M, G and T are powers of 1024)"
_SHARE_ALLOWED = "a share such as 25% or 0.25, 0 to 1"
_TIME_ALLOWED = "a duration such as 200us, 30s or 5min"


def parse_bytes(value: Any) -> int:
    """Bytes of "128MB", "1.5 GiB" or a whole number. ValueError says what is allowed."""
    if isinstance(value, str):
        return _quantity(value, _BYTES, _BYTES_ALLOWED)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"allowed: {_BYTES_ALLOWED}")
    return value


def parse_share(value: Any) -> float:
    """A share, 0 to 1, of "25%" or 0.25. ValueError says what is allowed."""
    if isinstance(value, str):
        found = _QUANTITY.fullmatch(value.strip())
        share = float(Decimal(found[1]) / 100) if found and found[2] == "%" else math.nan
    elif isinstance(value, bool) or not isinstance(value, int | float):
        share = math.nan
    else:
        share = float(value) if abs(value) <= 1 else math.nan
    if not 0 <= share <= 1:
        raise ValueError(f"allowed: {_SHARE_ALLOWED}")
    return share


def parse_seconds(value: Any) -> float:
    """Seconds of "200us", "30s" or a number of seconds. ValueError says what is allowed."""
    return _time(value, 10**9, "s")


def _parse_microseconds(value: Any) -> float:
    return _time(value, 10**3, "us")


def _time(value: Any, one: int, unit: str) -> float:
    """In units of ``one`` nanoseconds."""
    allowed = f"{_TIME_ALLOWED}; a number alone is {unit}"
    if isinstance(value, str):
        return _quantity(value, _NANOSECONDS, allowed) / one
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1e18:
        raise ValueError(f"allowed: {allowed}")
    return float(value)


def _quantity(text: str, units: Mapping[str, int], allowed: str) -> int:
    """A whole number of the smallest unit. Text without a unit is no quantity."""
    found = _QUANTITY.fullmatch(text.strip())
    if not found or found[2] not in units:
        raise ValueError(f"allowed: {allowed}")
    amount = Decimal(found[1]) * units[found[2]]
    if amount != int(amount):
        raise ValueError(f"is no whole number of {next(iter(units))}, allowed: {allowed}")
    return int(amount)


def show_bytes(count: int) -> str:
    """``128MiB``, or bytes where it is no whole number of KiB; read back it is the same."""
    for shift, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count and count % (1 << shift) == 0:
            return f"{count >> shift}{unit}"
    return f"{count}B"


Bytes = Annotated[
    int,
    BeforeValidator(parse_bytes),
    Allowed(_BYTES_ALLOWED),
    PlainSerializer(show_bytes, when_used="json"),
]
"""Bytes."""
Share = Annotated[float, BeforeValidator(parse_share), Allowed(_SHARE_ALLOWED)]
"""0 to 1."""
Seconds = Annotated[
    float, BeforeValidator(parse_seconds), Allowed(f"{_TIME_ALLOWED}; a number alone is s")
]
Microseconds = Annotated[
    float, BeforeValidator(_parse_microseconds), Allowed(f"{_TIME_ALLOWED}; a number alone is us")
]
