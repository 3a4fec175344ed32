"""Checksummed JSON, the form of every small file of a run: the envelope, and the base class of
all records. Knows no particular record, and never touches a disk.

A file is one ASCII JSON object that begins with its format version and ends with a checksum of all preceding
bytes, so that a truncated or altered file never parses. See docs/format.md.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from itertools import chain
from typing import Any, ClassVar, NoReturn, TypeVar

from flashckpt._native import xxh3_128
from flashckpt.errors import DamagedError, FormatError
from flashckpt.format.forms import Form, dump_fields, load_fields, shown

FORMAT = 1
"""Format version of every record."""
MAX_DEPTH = 200
# Parsing takes quadratic time. Python's default limit.
MAX_INTEGER_DIGITS = 4300

_BEFORE = b',"checksum":"'
_AFTER = b'"}\n'
_HEAD = b',"head":"'
TAIL_BYTES = len(_BEFORE) + 32 + len(_AFTER)
# Bytes that the checksum of the head takes.
_HEAD_END_BYTES = len(_HEAD) + 32 + 1


def dump(obj: Mapping[str, object], after: Mapping[str, object] | None = None) -> bytes:
    """Return the bytes of a file with the fields of `obj`, then of `after`. With `after`, `parse_head` can
    read `obj` from a prefix of the file. Raises ValueError for values that `parse` would refuse (NaN,
    depth)."""
    for each in (obj, after or {}):
        assert each.keys().isdisjoint({"format", "head", "checksum"})
        if not _depth_within(each, MAX_DEPTH):
            raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
    text = _open_object({"format": FORMAT, **obj})
    if after is not None:
        rest = _open_object(after)[1:]
        text += _HEAD + _checksum(text) + b'"' + (b"," + rest if rest else b"")
    return text + _BEFORE + _checksum(text) + _AFTER


def compact(value: object) -> bytes:
    """Encode JSON in ASCII without spaces: equal values in equal order have equal bytes."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")


def _open_object(obj: Mapping[str, object]) -> bytes:
    """Encode an object without its closing brace."""
    return compact(obj)[:-1]


def _checksum(data: bytes | memoryview) -> bytes:
    return xxh3_128(data).hex().encode("ascii")


def checked(data: bytes, *, what: str) -> None:
    """Raise DamagedError unless a whole file ends with the checksum of its bytes."""
    tail = data[-TAIL_BYTES:]
    if not tail.startswith(_BEFORE) or not tail.endswith(_AFTER):
        _refuse(what, "it does not end with its checksum")
    if tail[len(_BEFORE) : -len(_AFTER)] != _checksum(memoryview(data)[:-TAIL_BYTES]):
        _refuse(what, "its checksum does not match")


def parse_head(data: bytes, *, what: str) -> dict[str, Any] | None:
    """Parse and verify the head of a file from its first bytes, `data`. Return None if they do not hold the
    whole head. Raises the errors of `parse`."""
    text = _head_of(data, what)
    return None if text is None else _without_format(strict_loads(text + b"}", what=what), what)


def _head_of(data: bytes, what: str) -> bytes | None:
    end = data.find(_HEAD)
    if end < 0 or len(data) < end + _HEAD_END_BYTES:
        return None
    if data[end + len(_HEAD) :][:33] != _checksum(data[:end]) + b'"':
        _refuse(what, "the checksum of its head does not match")
    return data[:end]


def parse(data: bytes, *, what: str, max_bytes: int) -> dict[str, Any]:
    """Parse a file's bytes into an object without format and checksum. `what` names the file in errors.

    Raises DamagedError for bytes that `dump` cannot have written, FormatError for another format.
    """
    if len(data) > max_bytes:
        _refuse(what, f"it has {len(data)} bytes, and at most {max_bytes} are possible")
    checked(data, what=what)
    obj = _without_format(strict_loads(data[:-TAIL_BYTES] + b"}", what=what), what)
    if "head" in obj and _head_of(data, what) is None:
        _refuse(what, "its head does not end")
    return obj


def _without_format(obj: dict[str, Any], what: str) -> dict[str, Any]:
    version = obj.pop("format", None)
    if type(version) is not int or version < 1:
        _refuse(what, "it has no format version")
    if version != FORMAT:
        raise FormatError(
            f"{what} is written in format {version}; this flashckpt reads only format {FORMAT}. Nothing was "
            "changed. Use the flashckpt that has written this run, or another folder.",
            path=what,
        )
    return obj


def strict_loads(data: bytes, *, what: str) -> dict[str, Any]:
    """Parse a JSON object strictly. Raises DamagedError for repeated keys, NaN, Infinity, numbers that
    overflow or are too long, and nesting deeper than MAX_DEPTH."""
    try:
        obj = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=unique,
            parse_constant=no_constant,
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
        f"{what} is damaged: {why}. It was not used. "
        "Run `flashckpt verify` on the run to see which steps are whole.",
        path=what,
    )


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object from pairs. Raises ValueError for a repeated key."""
    obj = dict(pairs)
    if len(obj) != len(pairs):
        raise ValueError("a key is repeated")
    return obj


def no_constant(name: str) -> NoReturn:
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
    """Whether `obj` nests at most `limit` levels. Breadth first, so hostile input cannot exhaust the
    stack."""
    level: list[Any] = [obj]
    for _ in range(limit):
        # A record has a list for each rank, so a call per list would be slow.
        within = chain.from_iterable(i if isinstance(i, (list, tuple)) else i.values() for i in level)
        level = [value for value in within if isinstance(value, (dict, list, tuple))]
        if not level:
            return True
    return False


R = TypeVar("R", bound="JsonRecord")


class JsonRecord:
    """One small file. It contains its kind, so that a file under the name of another kind is refused.
    `FORMS`: of its keys, which are attributes, in the order in which they stand."""

    __slots__ = ()
    KIND: ClassVar[str]
    FORMS: ClassVar[Mapping[str, Form[Any]]]
    MAX_BYTES: ClassVar[int] = 1 << 16

    def to_dict(self) -> dict[str, Any]:
        return dump_fields(self, self.FORMS)

    @classmethod
    def from_dict(cls: type[R], found: Mapping[str, Any]) -> R:
        """Raises ValueError for what `to_dict` never returns."""
        made = cls(**load_fields(found, cls.FORMS))
        made.check()
        return made

    def check(self) -> None:
        """Raise ValueError if its fields contradict each other."""

    def to_bytes(self) -> bytes:
        """Return the file's bytes. Raises ValueError if they exceed MAX_BYTES or could not be read back."""
        data = self._dumped()
        if len(data) > self.MAX_BYTES:
            raise ValueError(f"a {self.KIND} of {len(data)} bytes; at most {self.MAX_BYTES} can be read back")
        return data

    def _dumped(self) -> bytes:
        return dump({"kind": self.KIND, **self.to_dict()})

    @classmethod
    def from_bytes(cls: type[R], data: bytes, what: str) -> R:
        """Parse and validate a file. `what` names the file in errors. Raises DamagedError or FormatError."""
        return cls.from_parsed(parse(data, what=what, max_bytes=cls.MAX_BYTES), what)

    @classmethod
    def from_parsed(cls: type[R], found: Mapping[str, Any], what: str) -> R:
        if found.get("kind") != cls.KIND:
            _refuse(what, f"it is a {shown(found.get('kind'))} instead of a {cls.KIND!r}")
        try:
            return cls.from_dict(found)
        except ValueError as error:
            _refuse(what, str(error))
