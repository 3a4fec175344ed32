"""A list to which a program only appends (the log of a trainer), with each entry encoded once.

Owns the encoded entries: typed JSON, one entry a line, compressed in streams of about `_STREAM_BYTES` that
are joined to one value. It is bytes, so a large one becomes a leaf, which is copied without a new encoding.
The program may still change the newest `_OPEN` entries. An older one that it changes is saved as it was.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any

from flashckpt.errors import StateError
from flashckpt.format.records import MAX_VALUES_BYTES
from flashckpt.format.typed import decode_json, encode_json

_OPEN = 16
# Much smaller than the headroom of a slot: each further stream makes the leaf larger.
_STREAM_BYTES = 32 << 10
# A tenth of the time of the default level, for a fifth more bytes.
_LEVEL = 1
_KEYS = {"closed", "newest"}


class GrowingList:
    """A named state object that saves and restores the list which `get` returns.

    get: returns the live list. The whole list is encoded again if it is another object than before, is
    shorter, or has another object as its last encoded entry.
    """

    def __init__(self, get: Callable[[], list[Any]]) -> None:
        self._get = get
        self._reset()

    def _reset(self) -> None:
        self._list: list[Any] | None = None
        self._closed = b""  # compressed streams
        self._texts: list[bytes] = []  # encoded entries that are in no stream yet
        self._num_bytes = 0  # of `_texts`
        self._num_encoded = self._length = 0  # entries that are encoded, and that there were last
        self._last: Any = None  # the last encoded entry

    def state_dict(self) -> dict[str, Any]:
        """Return all entries, encoding only the new ones. Raises StateError for an entry without an exact
        encoding."""
        entries = self._live()
        if not self._continues(entries):
            self._reset()
        self._list = entries
        streams = [self._closed]
        for entry in entries[self._num_encoded : -_OPEN]:
            self._texts.append(encode_json(entry))
            self._num_bytes += len(self._texts[-1])
            self._num_encoded, self._last = self._num_encoded + 1, entry
            if self._num_bytes >= _STREAM_BYTES:
                streams.append(zlib.compress(b"\n".join(self._texts), _LEVEL))
                self._texts, self._num_bytes = [], 0
        self._closed = b"".join(streams)
        self._length = len(entries)
        newest = [encode_json(entry) for entry in entries[self._num_encoded :]]
        return {"closed": self._closed, "newest": b"\n".join([*self._texts, *newest])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Fill the live list with the saved entries. Raises ValueError for a state that `state_dict` cannot
        have returned."""
        if state.keys() != _KEYS:
            raise ValueError(f"not the state of a GrowingList: it has {sorted(map(str, state))}")
        entries: list[Any] = self._live()
        entries.clear()
        self._reset()
        for text in _streams(state["closed"]):
            entries += _decoded(text.split(b"\n"))
        self._closed, self._num_encoded = state["closed"], len(entries)
        self._last = entries[-1] if entries else None
        entries += _decoded(state["newest"].split(b"\n") if state["newest"] else [])
        self._list, self._length = entries, len(entries)

    def _live(self) -> list[Any]:
        found = self._get()
        if type(found) is not list:
            raise StateError(
                f"A GrowingList saves a list, and its `get` returned a {type(found).__name__}. Nothing was "
                "saved or changed. Return the list itself."
            )
        return found

    def _continues(self, entries: list[Any]) -> bool:
        """Whether the encoded entries are still the beginning of the list, as far as they are compared."""
        count, length = self._num_encoded, len(entries)
        # Of a list that was cut, entries that are encoded are among the newest, which may change.
        is_same = entries is self._list and (length >= self._length or length - _OPEN >= count)
        return is_same and (not count or entries[count - 1] is self._last)


def _streams(closed: bytes) -> Iterator[bytes]:
    """Yield the decompressed streams. Raises ValueError if it is damaged."""
    while closed:
        stream = zlib.decompressobj()
        try:
            text = stream.decompress(closed, MAX_VALUES_BYTES)
        except zlib.error as error:
            raise ValueError(f"the entries are damaged: {error}") from error
        if not stream.eof:
            raise ValueError("the entries are truncated or too many")
        yield text
        closed = stream.unused_data


def _decoded(texts: list[bytes]) -> list[Any]:
    found = decode_json(b"[" + b",".join(texts) + b"]")
    if not isinstance(found, list) or len(found) != len(texts):
        raise ValueError("the entries are not one a line")
    return found
