"""A list to which a program only appends (the log of a trainer), with each entry encoded once.

Owns the blocks of encoded entries: texts of typed JSON, one a line, compressed once `_BLOCK_BYTES` of them
are there, and joined so that a list of n entries has about log2(n) of them. The newest entries stay apart
from the blocks. Large blocks are bytes that become leaves, copied without being encoded again.

What is relied on, beside appending: a program may still change the newest `_OPEN` entries. Of the older ones
`_AUDITED` are compared at each call, in turns; where one differs, the whole list is encoded again. Until its
turn comes such a change is not in the snapshots.
"""

from __future__ import annotations

import logging
import zlib
from array import array
from collections.abc import Callable, Iterator
from typing import Any

from flashckpt.errors import StateError
from flashckpt.format.parts import MAX_VALUES_BYTES
from flashckpt.format.typed import decode_json, encode_json

log = logging.getLogger(__name__)

_OPEN = 16
_AUDITED = 16
# With the open entries less than what becomes a leaf: one that changes its size at each snapshot would have
# the whole state walked again.
_BLOCK_BYTES = 32 << 10
# A tenth of the time of the default level, for a fifth more bytes.
_LEVEL = 1
_KEYS = {"blocks", "newest"}


class GrowingList:
    """A named state object that keeps the list which `get` returns.

    get: returns the live list, the same object or another one each time. A list that is another object, that
    has become shorter, or whose last known entry is another object is encoded from its beginning.
    """

    def __init__(self, get: Callable[[], list[Any]]) -> None:
        self._get = get
        self._warned = False
        self._forget()

    def _forget(self) -> None:
        self._list: list[Any] | None = None
        self._blocks: list[bytes] = []  # compressed; each may hold several streams, one after the other
        self._texts: list[bytes] = []  # those that are closed and in no block yet
        self._num_bytes = 0  # of `_texts`
        self._marks = array("q")  # a hash of the text of each closed entry
        self._last: Any = None  # the last closed entry
        self._turn = 0

    def state_dict(self) -> dict[str, Any]:
        """All entries, of which only the new ones are encoded. Raises StateError for an entry without an
        exact encoding."""
        entries = self._live()
        if not self._continues(entries):
            self._forget()
        self._list = entries
        for entry in entries[len(self._marks) : max(0, len(entries) - _OPEN)]:
            self._close(entry, encode_json(entry))
        newest = [encode_json(entry) for entry in entries[len(self._marks) :]]
        return {"blocks": list(self._blocks), "newest": b"\n".join([*self._texts, *newest])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Give the live list the saved entries. Raises ValueError for what `state_dict` cannot have given."""
        if state.keys() != _KEYS:
            raise ValueError(f"not the state of a GrowingList: it has {sorted(map(str, state))}")
        entries: list[Any] = self._live()
        entries.clear()
        self._forget()
        for block in state["blocks"]:
            for text in _streams(block):
                texts = text.split(b"\n")
                entries += _decoded(texts)
                self._marks.extend(map(hash, texts))
            self._blocks.append(block)
        if entries:
            self._last = entries[-1]
        texts = state["newest"].split(b"\n") if state["newest"] else []
        entries += _decoded(texts)
        self._list = entries

    def _live(self) -> list[Any]:
        found = self._get()
        if type(found) is not list:
            raise StateError(
                f"A GrowingList keeps a list, and its `get` returned a {type(found).__name__}. Nothing was "
                "saved or changed. Return the list itself."
            )
        return found

    def _continues(self, entries: list[Any]) -> bool:
        """Whether what is encoded is the beginning of the list, as far as it is compared."""
        closed = len(self._marks)
        if entries is not self._list or len(entries) < closed:
            return False
        if closed and entries[closed - 1] is not self._last:
            return False
        for _ in range(min(_AUDITED, closed)):
            self._turn = (self._turn + 1) % closed
            if hash(encode_json(entries[self._turn])) != self._marks[self._turn]:
                if not self._warned:
                    self._warned = True
                    log.warning(
                        "entry %d of a list that is kept as one that only grows was changed after it was "
                        "saved. The whole list is encoded again. Steps saved since the change may hold the "
                        "entry as it was before; name the list itself if its entries change",
                        self._turn,
                    )
                return False
        return True

    def _close(self, entry: Any, text: bytes) -> None:
        self._texts.append(text)
        self._marks.append(hash(text))
        self._num_bytes += len(text)
        self._last = entry
        if self._num_bytes < _BLOCK_BYTES:
            return
        self._blocks.append(zlib.compress(b"\n".join(self._texts), _LEVEL))
        self._texts, self._num_bytes = [], 0
        # As a binary counter carries: each byte is copied once for each doubling of the list.
        while len(self._blocks) > 1 and len(self._blocks[-2]) < 2 * len(self._blocks[-1]):
            last = self._blocks.pop()
            self._blocks[-1] += last


def _streams(block: bytes) -> Iterator[bytes]:
    """The texts in a block. Raises ValueError where it is damaged."""
    while block:
        stream = zlib.decompressobj()
        try:
            text = stream.decompress(block, MAX_VALUES_BYTES)
        except zlib.error as error:
            raise ValueError(f"a block of entries is damaged: {error}") from error
        if not stream.eof:
            raise ValueError("a block of entries is cut off, or too large")
        yield text
        block = stream.unused_data


def _decoded(texts: list[bytes]) -> list[Any]:
    found = decode_json(b"[" + b",".join(texts) + b"]")
    if not isinstance(found, list) or len(found) != len(texts):
        raise ValueError("a block of entries does not hold one entry a line")
    return found
