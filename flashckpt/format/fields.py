"""Bounded readings of parsed JSON: every number has limits, every text a length, every list a count.

Owns the checks that stand between a hostile file and the records; knows no record itself.
"""

from __future__ import annotations

import re
from typing import Any, NoReturn

from flashckpt.errors import DamagedError

MAX_INTEGER = 2**63 - 1
MAX_ITEMS = 10_000_000


class Fields:
    """One JSON object, read field by field. Each reading raises DamagedError, naming file and field."""

    __slots__ = ("_obj", "what")

    def __init__(self, obj: object, what: str) -> None:
        self.what = what
        if not isinstance(obj, dict):
            self.refuse("an object is missing")
        self._obj: dict[str, Any] = obj

    def refuse(self, why: str) -> NoReturn:
        raise DamagedError(
            f"{self.what} is damaged: {why}. Nothing of it was used. "
            "Run `flashckpt verify` on the run to see which steps are whole.",
            path=self.what,
        )

    def has(self, key: str) -> bool:
        return self._obj.get(key) is not None

    def integer(self, key: str, low: int = 0, high: int = MAX_INTEGER) -> int:
        value = self._obj.get(key)
        if type(value) is not int or not low <= value <= high:
            self.refuse(f"{key!r} is not a whole number from {low} to {high}")
        return value

    def text(self, key: str, *, max_chars: int = 4096, pattern: re.Pattern[str] | None = None) -> str:
        value = self._obj.get(key)
        if not isinstance(value, str) or len(value) > max_chars:
            self.refuse(f"{key!r} is not a text of at most {max_chars} characters")
        if pattern is not None and pattern.fullmatch(value) is None:
            self.refuse(f"{key!r} is {value[:80]!r}, which is no such name")
        return value

    def items(self, key: str, max_items: int = MAX_ITEMS) -> list[Any]:
        value = self._obj.get(key)
        if not isinstance(value, list) or len(value) > max_items:
            self.refuse(f"{key!r} is not a list of at most {max_items} items")
        return value

    def plain(self, key: str) -> dict[str, Any]:
        """An object that is opaque here."""
        value = self._obj.get(key)
        if not isinstance(value, dict):
            self.refuse(f"{key!r} is not an object")
        return value

    def within(self, key: str) -> Fields:
        return Fields(self._obj.get(key), self.what)

    def each(self, key: str, max_items: int = MAX_ITEMS) -> list[Fields]:
        return [Fields(item, self.what) for item in self.items(key, max_items)]

    def hex(self, key: str, num_bytes: int) -> bytes:
        """Exactly `num_bytes` bytes, written as lower-case hex digits."""
        value = self._obj.get(key)
        if not isinstance(value, str) or len(value) != 2 * num_bytes:
            self.refuse(f"{key!r} does not hold {num_bytes} bytes")
        try:
            decoded = bytes.fromhex(value)
        except ValueError:
            self.refuse(f"{key!r} is not hex")
        if len(decoded) != num_bytes:
            self.refuse(f"{key!r} is not hex")
        return decoded
