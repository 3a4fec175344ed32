"""Numbers as people read them. Owns no meaning: JSON output always has the plain number."""

from __future__ import annotations

from datetime import datetime, timezone

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def size(num_bytes: int) -> str:
    """1536 -> "1.5 KiB"."""
    value = float(num_bytes)
    for unit in _BINARY:
        if value < 1024 or unit == _BINARY[-1]:
            return f"{num_bytes} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError


def iso_time(seconds: float) -> str:
    """Seconds since 1970 as ISO 8601, in UTC."""
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="seconds")


def local_time(seconds: float) -> str:
    """Seconds since 1970 as this machine's clock shows them."""
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")


def shape(sizes: tuple[int, ...]) -> str:
    """(3, 4) -> "3 × 4"; a tensor without dimensions has the shape "scalar"."""
    return " × ".join(map(str, sizes)) if sizes else "scalar"
