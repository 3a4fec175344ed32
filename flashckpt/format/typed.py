"""Typed JSON: the encoding of the state's values that are not tensors.

A value is decoded with its exact type, order and bits, or encoding it fails. Decoding builds values from a
fixed table of tags; it never looks up, imports or calls anything by a name that it reads. Never imports torch
or NumPy: flashckpt/state/values.py registers their types.

Plain JSON represents itself: null, true, false, numbers, strings, arrays (list), objects (dict with string
keys, in order). Every other value is an object with one key, its tag, which begins with "!". A dict with such
a key, or with keys that are not strings, is written as pairs under "!dict".
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
import operator
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from flashckpt.errors import DamagedError, StateError
from flashckpt.format.checked_json import no_constant, unique

MAX_DEPTH = 100
_FEW = 16
_MAX_PLAIN_INT = 1 << 2000  # Python refuses to parse decimal numbers of more than 4,300 digits

Encoder = Callable[[Any, int], object]
Decoder = Callable[[Any], object]
Same = Callable[[Any, Any], bool]


@dataclass(frozen=True, slots=True)
class LeafRef:
    """Placeholder for a tensor. `about`: simple values that its bytes, shape and strides do not tell."""

    name: str
    about: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Hole:
    """Placeholder for a value that is written elsewhere, in the order of the holes."""


class Encoded:
    """A value with its encoded text, which is made once and may be written repeatedly."""

    __slots__ = ("data", "value")

    def __init__(self, value: object, data: bytes | None = None) -> None:
        self.value = value
        self.data = encode_json(value) if data is None else data


def register(
    kinds: type | tuple[type, ...],
    tag: str,
    to_plain: Callable[[Any], object],
    from_plain: Decoder,
    *,
    same: Same = operator.eq,
) -> None:
    """Register exact types with the encoding. `to_plain` returns encodable values or raises ValueError.
    `from_plain` decodes them and raises ValueError, TypeError or LookupError for invalid ones. `same`
    compares two values bit by bit. Raises ValueError for a tag that is taken."""
    if tag in _decoders:
        raise ValueError(f"the tag {tag!r} is taken")

    def encoder(value: object, depth: int) -> object:
        try:
            plain = to_plain(value)
        except ValueError as error:
            raise StateError(str(error)) from error
        return {"!" + tag: encode(plain, depth)}

    _decoders[tag] = from_plain
    for kind in kinds if isinstance(kinds, tuple) else (kinds,):
        _encoders[kind], _same[kind] = encoder, same


SEQUENCES = (list, tuple, deque)


def children(value: object) -> Iterable[tuple[Any, Any]]:
    """The items of a mapping, list, tuple or deque by key or position; nothing for other values."""
    if isinstance(value, Mapping):
        return value.items()
    return enumerate(value) if isinstance(value, SEQUENCES) else ()


# Writing


def encode(value: object, depth: int = 0) -> Any:
    """Encode `value` for json.dumps. Raises StateError if it has no exact encoding."""
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is float:
        return value if math.isfinite(value) else {"!float": struct.pack(">d", value).hex()}  # type: ignore[arg-type]
    if kind is int:
        return value if -_MAX_PLAIN_INT < value < _MAX_PLAIN_INT else {"!int": hex(value)}  # type: ignore[operator, arg-type]
    if kind is str:
        return _encode_str(value)  # type: ignore[arg-type]
    if depth > MAX_DEPTH:
        raise StateError(f"values nest deeper than {MAX_DEPTH} levels, or contain themselves")
    encoder = _encoders.get(kind)
    if encoder is None:
        raise StateError(f"a {kind.__module__}.{kind.__qualname__} has no exact encoding")
    return encoder(value, depth + 1)


def encode_json(value: object) -> bytes:
    """Encode `value` as compact typed JSON in ASCII. Raises StateError if it has no exact encoding."""
    pieces: list[bytes] = []
    _write(value, pieces)
    return b"".join(pieces)


def _write(value: object, pieces: list[bytes]) -> None:
    if type(value) is Encoded:
        pieces.append(value.data)
    elif type(value) is list and _holds_encoded(value):
        for position, item in enumerate(value):
            pieces.append(b"," if position else b"[")
            _write(item, pieces)
        pieces.append(b"]")
    elif type(value) is dict and _holds_encoded(value) and all(map(_is_plain_key, value)):
        for position, (key, item) in enumerate(value.items()):
            pieces.append(b"%b%b:" % (b"," if position else b"{", _dumps(key).encode()))
            _write(item, pieces)
        pieces.append(b"}")
    else:
        pieces.append(_dumps(encode(value)).encode("ascii"))


_dumps = json.JSONEncoder(separators=(",", ":"), allow_nan=False, check_circular=False).encode


def _holds_encoded(value: object, levels: int = 7) -> bool:
    """Whether `value` contains an Encoded. Searches where this library puts them: in dicts, and in short
    lists of them or of dicts."""
    if type(value) is Encoded:
        return True
    inner: Iterable[object] = ()
    if type(value) is dict:
        inner = value.values()
    elif type(value) is list and 0 < len(value) <= _FEW and type(value[0]) in (dict, Encoded):
        inner = value
    return levels > 0 and any(_holds_encoded(item, levels - 1) for item in inner)


def _is_plain_key(key: object) -> bool:
    return type(key) is str and key[:1] != "!" and key.isascii()


def _encode_str(value: str) -> object:
    if value.isascii():
        return value
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON would join two lone surrogates into one character
        return {"!str": value.encode("utf-16-le", "surrogatepass").hex()}
    return value


def _encode_items(values: Iterable[object], depth: int) -> list[object]:
    items = list(values)
    if len(items) > _FEW:  # fast path for ten thousand step counters or names
        kinds = set(map(type, items))
        if kinds <= {bool, type(None)}:
            return items
        if kinds == {int} and min(items) > -_MAX_PLAIN_INT and max(items) < _MAX_PLAIN_INT:  # type: ignore[type-var, operator]
            return items
        if kinds == {str} and "".join(items).isascii():  # type: ignore[arg-type]
            return items
        if kinds == {float} and all(map(math.isfinite, items)):  # type: ignore[arg-type]
            return items
    return [encode(item, depth) for item in items]


def _encode_dict(value: dict[object, object], depth: int) -> object:
    for key in value:
        if not _is_plain_key(key):
            return {"!dict": _encode_pairs(value, depth)}
    return {key: encode(item, depth) for key, item in value.items()}


def _encode_pairs(value: Mapping[Any, object], depth: int) -> list[object]:
    return [[encode(key, depth), encode(item, depth)] for key, item in value.items()]


def _encode_defaultdict(value: defaultdict[object, object], depth: int) -> object:
    for name, factory in _FACTORIES.items():
        if value.default_factory is factory:
            return {"!defaultdict": [name, _encode_pairs(value, depth)]}
    raise StateError(f"a defaultdict of {value.default_factory!r} has no exact encoding: only of plain types")


def _encode_leaf(value: LeafRef, depth: int) -> object:
    return {"!leaf": [value.name, encode(dict(value.about), depth)] if value.about else value.name}


_FACTORIES: dict[str, Any] = {
    "none": None, "list": list, "dict": dict, "set": set, "int": int, "float": float, "str": str,
    "bool": bool, "tuple": tuple, "deque": deque, "Counter": Counter, "OrderedDict": OrderedDict,
}  # fmt: skip

_encoders: dict[type, Encoder] = {
    list: _encode_items,
    dict: _encode_dict,
    tuple: lambda v, d: {"!tuple": _encode_items(v, d)},
    set: lambda v, d: {"!set": _encode_items(v, d)},
    frozenset: lambda v, d: {"!frozenset": _encode_items(v, d)},
    deque: lambda v, d: {"!deque": [v.maxlen, _encode_items(v, d)]},
    Counter: lambda v, d: {"!Counter": _encode_pairs(v, d)},
    OrderedDict: lambda v, d: {"!OrderedDict": _encode_pairs(v, d)},
    defaultdict: _encode_defaultdict,
    bytes: lambda v, d: {"!bytes": base64.b64encode(v).decode()},
    bytearray: lambda v, d: {"!bytearray": base64.b64encode(v).decode()},
    complex: lambda v, d: {"!complex": struct.pack(">dd", v.real, v.imag).hex()},
    range: lambda v, d: {"!range": [encode(v.start), encode(v.stop), encode(v.step)]},
    slice: lambda v, d: {"!slice": [encode(v.start, d), encode(v.stop, d), encode(v.step, d)]},
    LeafRef: _encode_leaf,
    Hole: lambda v, d: {"!hole": None},
    Encoded: lambda v, d: encode(v.value, d),
}


# Reading


def decode(obj: object, depth: int = 0) -> Any:
    """Decode parsed JSON. Raises DamagedError for JSON that `encode` never writes."""
    if depth > 4 * MAX_DEPTH + 1:
        _damaged("values nest too deep")
    if type(obj) is dict:
        return _decode_object(obj, depth)
    if type(obj) is list:
        return [decode(item, depth + 1) for item in obj]
    if type(obj) is float and not math.isfinite(obj):
        _damaged("a number that was never written")
    return obj


def decode_json(data: bytes | memoryview) -> Any:
    """Decode a value written by `encode_json`. The caller bounds the size. Raises DamagedError."""
    try:
        parsed = json.loads(bytes(data), object_pairs_hook=unique, parse_constant=no_constant)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"The values of a snapshot are not JSON ({error}). It cannot be used.") from error
    return decode(parsed)


def _decode_object(obj: dict[str, object], depth: int) -> object:
    tagged = [key for key in obj if key[:1] == "!"]
    if not tagged:
        return {key: decode(item, depth + 1) for key, item in obj.items()}
    if len(obj) != 1 or tagged[0][1:] not in _decoders:
        _damaged(f"the tag {tagged[0]!r} is unknown")
    payload = decode(obj[tagged[0]], depth + 1)
    try:
        return _decoders[tagged[0][1:]](payload)
    except (ValueError, TypeError, LookupError, OverflowError, struct.error) as error:
        raise DamagedError(f"The values of a snapshot are damaged at {tagged[0]!r}: {error}.") from error


def _damaged(what: str) -> NoReturn:
    raise DamagedError(f"The values of a snapshot are damaged: {what}. It cannot be used.")


def _pairs_into(made: Any, pairs: list[list[object]]) -> Any:
    for key, item in pairs:
        made[key] = item
    if len(made) != len(pairs):
        raise ValueError("a key is repeated")
    return made


def _decode_set(items: list[Any]) -> set[Any]:
    made = set(_a_list(items))
    if len(made) != len(items):
        raise ValueError("an element is repeated")
    return made


def _a_list(items: Any) -> list[Any]:
    if type(items) is not list:
        raise TypeError(f"{type(items).__name__} instead of a list")
    return items


def _decode_leaf(plain: Any) -> LeafRef:
    name, about = (plain, {}) if type(plain) is str else plain
    if type(name) is not str or type(about) is not dict:
        raise TypeError("a leaf without a name")
    return LeafRef(name, about)


_decoders: dict[str, Decoder] = {
    "float": lambda text: struct.unpack(">d", bytes.fromhex(text))[0],
    "int": lambda text: int(text, 16),
    "str": lambda text: bytes.fromhex(text).decode("utf-16-le", "surrogatepass"),
    "dict": lambda pairs: _pairs_into({}, pairs),
    "tuple": lambda items: tuple(_a_list(items)),
    "set": _decode_set,
    "frozenset": lambda items: frozenset(_decode_set(items)),
    "deque": lambda plain: deque(_a_list(plain[1]), plain[0]),
    "Counter": lambda pairs: _pairs_into(Counter(), pairs),
    "OrderedDict": lambda pairs: _pairs_into(OrderedDict(), pairs),
    "defaultdict": lambda plain: _pairs_into(defaultdict(_FACTORIES[plain[0]]), plain[1]),
    "bytes": lambda text: base64.b64decode(text, validate=True),
    "bytearray": lambda text: bytearray(base64.b64decode(text, validate=True)),
    "complex": lambda text: complex(*struct.unpack(">dd", bytes.fromhex(text))),
    "range": lambda plain: range(*plain),
    "slice": lambda plain: slice(*plain),
    "leaf": _decode_leaf,
    "hole": lambda plain: Hole(),
}


# Checking


def check_roundtrip(value: object, location: str) -> None:
    """Raise StateError, with the path in the state, if `value` is not decoded bit by bit."""
    checked(value, location)


def checked(value: object, location: str) -> Encoded:
    """Return the decoded `value`, which shares nothing with it, with its text. Raises StateError, with the
    path in the state, if the decoded value differs in any bit."""
    try:
        data = encode_json(value)
        back = decode_json(data)
        if same(value, back):
            return Encoded(back, data)
        reason = "its decoded form differs"
    except (StateError, DamagedError) as error:
        reason = str(error)
    path, found = _locate(value, location)
    kind = type(found)
    raise StateError(
        f"{path} cannot be saved exactly: {reason} (it holds a {kind.__module__}.{kind.__qualname__}). "
        "Nothing was saved or changed. Turn it into plain values, lists, dicts or tensors, or leave it out.",
        location=path,
    )


def too_large(values: Mapping[str, object], num_bytes: int, most_bytes: int) -> StateError:
    """The error for values that take `num_bytes` as JSON where `most_bytes` are allowed. Names the path of
    the largest part."""
    path, part, size = _largest(values, "", num_bytes)
    return StateError(
        f"{path or 'the state'} takes {size:,} bytes as plain values ({type(part).__name__}). All of them "
        f"take {num_bytes:,} bytes, and a snapshot has room for {most_bytes:,} per rank: it could never be "
        "committed, so it is not saved. Keep large data in tensors, NumPy arrays or bytes, which are stored "
        "as they are, or leave it out of the state.",
        location=path,
    )


def _largest(value: object, path: str, num_bytes: int) -> tuple[str, object, int]:
    """The innermost part that takes more than half of `value`, with its path and its number of bytes."""
    while True:
        for key, part in children(value):
            size = len(encode_json(part))
            if 2 * size > num_bytes:
                value, path, num_bytes = part, f"{path}.{key}" if path else str(key), size
                break
        else:
            return path, value, num_bytes


def _locate(value: object, path: str, depth: int = 0) -> tuple[str, object]:
    """The path of the innermost part of `value` that is not decoded exactly, and the part."""
    if isinstance(value, Encoded):
        return _locate(value.value, path, depth)
    for key, part in children(value) if depth < MAX_DEPTH else ():
        with contextlib.suppress(StateError, DamagedError):
            if same(part, decode_json(encode_json(part))):
                continue
        return _locate(part, f"{path}.{key}", depth + 1)
    return path, value


def same(a: Any, b: Any) -> bool:
    """Whether two values have the same types and order and equal bits."""
    if type(a) is Encoded:
        return same(a.value, b)
    if type(a) is not type(b):
        return False
    if type(a) in _same:
        return bool(_same[type(a)](a, b))
    if isinstance(a, (set, frozenset)):
        return sorted(map(encode_json, a)) == sorted(map(encode_json, b))
    if isinstance(a, Mapping):
        facts = not isinstance(a, defaultdict) or a.default_factory is b.default_factory
        return facts and len(a) == len(b) and all(map(same, a.items(), b.items()))
    if isinstance(a, (list, tuple, deque)):
        facts = not isinstance(a, deque) or a.maxlen == b.maxlen
        return facts and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


_same: dict[type, Same] = {
    float: lambda a, b: struct.pack(">d", a) == struct.pack(">d", b),
    complex: lambda a, b: struct.pack(">dd", a.real, a.imag) == struct.pack(">dd", b.real, b.imag),
    slice: lambda a, b: same((a.start, a.stop, a.step), (b.start, b.stop, b.step)),
}
