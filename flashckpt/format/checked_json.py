"""Checksummed JSON, the form of every small file of a run. Owns the envelope and what it refuses.

A file is one ASCII JSON object that begins with its format version and ends with a checksum of all
bytes before it, so that a file cut short, exchanged or flipped never parses. Never touches a disk.
See docs/format.md.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn

from flashckpt._native import xxh3_128
from flashckpt.errors import DamagedError, FormatError

FORMAT = 1
MAX_DEPTH = 200
# Python refuses longer ones by default; a longer one takes quadratic time to parse.
MAX_INTEGER_DIGITS = 4300

_BEFORE = b',"checksum":"'
_AFTER = b'"}\n'
_TAIL_BYTES = len(_BEFORE) + 32 + len(_AFTER)


def dump(obj: Mapping[str, object]) -> bytes:
    """The bytes of a file that holds `obj`. ValueError for what `parse` would refuse (NaN, depth)."""
    assert "format" not in obj
    assert "checksum" not in obj
    if not _depth_within(obj, MAX_DEPTH):
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
    text = json.dumps({"format": FORMAT, **obj}, separators=(",", ":"), allow_nan=False)
    head = text[:-1].encode("ascii")
    return head + _BEFORE + xxh3_128(head).hex().encode("ascii") + _AFTER


def parse(data: bytes, *, what: str, max_bytes: int) -> dict[str, Any]:
    """The object in a file's bytes, without its format and checksum. `what` names the file in errors.

    DamagedError for anything but bytes that `dump` could have written; FormatError for a newer format.
    """
    if len(data) > max_bytes:
        _refuse(what, f"{len(data)} bytes, where at most {max_bytes} can be")
    head, tail = data[:-_TAIL_BYTES], data[-_TAIL_BYTES:]
    if not head or not tail.startswith(_BEFORE) or not tail.endswith(_AFTER):
        _refuse(what, "it does not end with its checksum")
    if xxh3_128(head).hex().encode("ascii") != tail[len(_BEFORE) : -len(_AFTER)]:
        _refuse(what, "its checksum does not match")
    obj = strict_loads(head + b"}", what=what)
    version = obj.pop("format", None)
    if type(version) is not int or version < 1:
        _refuse(what, "it has no format version")
    if version > FORMAT:
        raise FormatError(
            f"{what} is written in format {version}; this flashckpt reads up to {FORMAT}. "
            "Nothing was changed. Upgrade flashckpt to use this run.",
            path=what,
        )
    return obj


def strict_loads(data: bytes, *, what: str) -> dict[str, Any]:
    """A JSON object, refused with DamagedError where JSON is lax: repeated keys, NaN, Infinity, numbers
    that overflow or never end, nesting deeper than MAX_DEPTH."""
    try:
        obj = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_no_constant,
            parse_float=_finite,
            parse_int=_bounded,
        )
    except (ValueError, RecursionError) as error:
        _refuse(what, f"it is not the JSON that was written ({error})")
    if not isinstance(obj, dict) or not _depth_within(obj, MAX_DEPTH):
        _refuse(what, f"it is not an object of at most {MAX_DEPTH} levels")
    return obj


def _refuse(what: str, why: str) -> NoReturn:
    raise DamagedError(
        f"{what} is damaged: {why}. Nothing of it was used. "
        "Run `flashckpt verify` on the run to see which steps are whole.",
        path=what,
    )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    obj = dict(pairs)
    if len(obj) != len(pairs):
        raise ValueError("a key stands twice")
    return obj


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number overflows")
    return value


def _bounded(text: str) -> int:
    if len(text) > MAX_INTEGER_DIGITS:
        raise ValueError(f"an integer of {len(text)} digits")
    return int(text)


def _depth_within(obj: object, limit: int) -> bool:
    """Breadth first, so that the depth of hostile input never becomes the depth of the stack."""
    level: list[object] = [obj]
    for _ in range(limit):
        below: list[object] = []
        for item in level:
            values = item.values() if isinstance(item, Mapping) else item
            below += [v for v in values if isinstance(v, (dict, list, tuple))]  # type: ignore[attr-defined]
        if not below:
            return True
        level = below
    return False
