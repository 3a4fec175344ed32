"""Forms: how values stand in JSON, described once for writing and for reading. Knows no particular record.

`load` checks all that it reads. It raises ValueError, with the place, for what `dump` never writes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, TypeVar

from flashckpt.format.names import AttemptName, SnapshotId

MAX_INTEGER = 2**63 - 1
MAX_ITEMS = 10_000_000
_MAX_NAME = 255
_SHOWN = 80

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Form(Generic[T]):
    """`dump` returns plain JSON of a value, `load` the value. `load` gets None for an absent key."""

    dump: Callable[[T], Any]
    load: Callable[[Any], T]


def _plain(value: T) -> T:
    return value


def integer(low: int = 0, high: int = MAX_INTEGER) -> Form[int]:
    def load(found: Any) -> int:
        if type(found) is not int or not low <= found <= high:
            raise ValueError(f"{shown(found)} is not a whole number from {low} to {high}")
        return found

    return Form(_plain, load)


def text(pattern: re.Pattern[str] | None = None, *, max_chars: int = 4096) -> Form[str]:
    def load(found: Any) -> str:
        if not isinstance(found, str) or len(found) > max_chars:
            raise ValueError(f"{shown(found)} is not a text of at most {max_chars} characters")
        if pattern is not None and pattern.fullmatch(found) is None:
            raise ValueError(f"{shown(found)} is not a valid name")
        return found

    return Form(_plain, load)


def of_type(kind: type[T], what: str) -> Form[T]:
    """A value whose contents are not checked."""

    def load(found: Any) -> T:
        if type(found) is not kind:
            raise ValueError(f"{shown(found)} is not {what}")
        return found

    return Form(_plain, load)


FLAG: Form[bool] = of_type(bool, "true or false")
OBJECT: Form[Mapping[str, Any]] = Form(dict, of_type(dict, "an object").load)


def _of_hex(found: Any) -> bytes:
    if not isinstance(found, str) or len(found) % 2 or re.fullmatch(r"[0-9a-f]*", found) is None:
        raise ValueError(f"{shown(found)} is not bytes as hex digits")
    return bytes.fromhex(found)


HEX: Form[bytes] = Form(bytes.hex, _of_hex)


def named(parse: Callable[[str], T | None], what: str) -> Form[T]:
    """A value that stands as its text."""
    known = lru_cache(maxsize=1024)(parse)  # a catalogue repeats few names

    def load(found: Any) -> T:
        value = known(found) if isinstance(found, str) and len(found) <= _MAX_NAME else None
        if value is None:
            raise ValueError(f"{shown(found)} is not the name of {what}")
        return value

    return Form(str, load)


def optional(form: Form[T]) -> Form[T | None]:
    return Form(
        lambda value: None if value is None else form.dump(value),
        lambda found: None if found is None else form.load(found),
    )


def items(form: Form[T], most: int = MAX_ITEMS) -> Form[tuple[T, ...]]:
    """A list of at most `most` values of one form."""

    def load(found: Any) -> tuple[T, ...]:
        if type(found) is not list or len(found) > most:
            raise ValueError(f"{shown(found)} is not a list of at most {most} items")
        return tuple(map(form.load, found))

    return Form(lambda values: list(map(form.dump, values)), load)


def a_set(form: Form[T]) -> Form[frozenset[T]]:
    """A list in ascending order."""
    listed: Form[Any] = items(form)

    def dump(values: frozenset[Any]) -> Any:
        return listed.dump(sorted(values))

    return Form(dump, lambda found: frozenset(listed.load(found)))


def pair(one: Form[Any], other: Form[Any]) -> Form[tuple[Any, Any]]:
    def load(found: Any) -> tuple[Any, Any]:
        if type(found) is not list or len(found) != 2:
            raise ValueError(f"{shown(found)} is not a pair")
        return one.load(found[0]), other.load(found[1])

    return Form(lambda value: [one.dump(value[0]), other.dump(value[1])], load)


def row(make: Callable[..., T], **forms: Form[Any]) -> Form[T]:
    """A list with the attributes of a value."""
    dumps, loads = ([getattr(form, of) for form in forms.values()] for of in ("dump", "load"))
    names = tuple(forms)

    def load(found: Any) -> T:
        if type(found) is not list or len(found) != len(names):
            raise ValueError(f"{shown(found)} is not a row of {', '.join(names)}")
        return make(**{name: read(item) for name, read, item in zip(names, loads, found, strict=True)})

    def dump(value: T) -> list[Any]:
        return [write(getattr(value, name)) for name, write in zip(names, dumps, strict=True)]

    return Form(dump, load)


def record(make: Callable[..., T], **forms: Form[Any]) -> Form[T]:
    """An object with the attributes of a value."""
    return Form(
        lambda value: dump_fields(value, forms), lambda found: make(**load_fields(OBJECT.load(found), forms))
    )


def fields(**forms: Form[Any]) -> Mapping[str, Form[Any]]:
    return forms


def dump_fields(value: object, forms: Mapping[str, Form[Any]]) -> dict[str, Any]:
    return {key: form.dump(getattr(value, key)) for key, form in forms.items()}


def load_fields(found: Mapping[str, Any], forms: Mapping[str, Form[Any]]) -> dict[str, Any]:
    """The values of these keys. Other keys are ignored."""
    values = {}
    for key, form in forms.items():
        try:
            values[key] = form.load(found.get(key))
        except ValueError as error:
            raise ValueError(f"{key!r}: {error}") from error
    return values


def shown(found: object) -> str:
    """A value of JSON in an error: its kind if it may be long."""
    return type(found).__name__ if isinstance(found, (list, dict)) else repr(found)[:_SHOWN]


ATTEMPT: Form[AttemptName] = named(AttemptName.parse, "an attempt")
ID: Form[SnapshotId] = row(SnapshotId, attempt=ATTEMPT, boundary=integer())
