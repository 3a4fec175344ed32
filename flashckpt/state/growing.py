"""A list to which a program only appends (the log of a trainer), with each entry encoded once.

Owns the blocks of encoded entries: typed JSON, one entry a line. A block is compressed once it has
`_BLOCK_BYTES`, and blocks are joined so that a list of n entries has about log2(n) blocks. The newest entries
are in no block. A large block is bytes and so becomes a leaf, which is copied without a new encoding.

A program may still change the newest `_OPEN` entries. Each call compares `_AUDITED` of the older entries, in
turns, and encodes the whole list again if one differs. Until its turn comes, a changed entry is saved as it
was before.
"""

from __future__ import annotations

import logging
import zlib
from array import array
from collections.abc import Callable, Iterator
from typing import Any

from flashckpt.errors import StateError
from flashckpt.format.records import MAX_VALUES_BYTES
from flashckpt.format.typed import decode_json, encode_json

log = logging.getLogger(__name__)

_OPEN = 16
_AUDITED = 16
# Together with the open entries, smaller than a leaf: a leaf that changes its size at each snapshot would
# cause a new walk of the whole state.
_BLOCK_BYTES = 32 << 10
# A tenth of the time of the default level, for a fifth more bytes.
_LEVEL = 1
_KEYS = {"blocks", "newest"}


class GrowingList:
    """A named state object that saves and restores the list which `get` returns.

    get: returns the live list. The whole list is encoded again if it is another object than before, is
    shorter, or has another object as its last encoded entry.
    """

    def __init__(self, get: Callable[[], list[Any]]) -> None:
        self._get = get
        self._warned = False
        self._reset()

    def _reset(self) -> None:
        self._list: list[Any] | None = None
        self._blocks: list[bytes] = []  # compressed; one block may hold several streams in sequence
        self._texts: list[bytes] = []  # closed entries that are in no block yet
        self._num_bytes = 0  # of `_texts`
        self._hashes = array("q")  # a hash of the text of each closed entry
        self._last: Any = None  # the last closed entry
        self._turn = 0

    def state_dict(self) -> dict[str, Any]:
        """Return all entries, encoding only the new ones. Raises StateError for an entry without an exact
        encoding."""
        entries = self._live()
        if not self._continues(entries):
            self._reset()
        self._list = entries
        for entry in entries[len(self._hashes) : max(0, len(entries) - _OPEN)]:
            self._close(entry, encode_json(entry))
        newest = [encode_json(entry) for entry in entries[len(self._hashes) :]]
        return {"blocks": list(self._blocks), "newest": b"\n".join([*self._texts, *newest])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Fill the live list with the saved entries. Raises ValueError for a state that `state_dict` cannot
        have returned."""
        if state.keys() != _KEYS:
            raise ValueError(f"not the state of a GrowingList: it has {sorted(map(str, state))}")
        entries: list[Any] = self._live()
        entries.clear()
        self._reset()
        for block in state["blocks"]:
            for text in _streams(block):
                texts = text.split(b"\n")
                entries += _decoded(texts)
                self._hashes.extend(map(hash, texts))
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
                f"A GrowingList saves a list, and its `get` returned a {type(found).__name__}. Nothing was "
                "saved or changed. Return the list itself."
            )
        return found

    def _continues(self, entries: list[Any]) -> bool:
        """Whether the encoded entries are still the beginning of the list, as far as they are compared."""
        closed = len(self._hashes)
        if entries is not self._list or len(entries) < closed:
            return False
        if closed and entries[closed - 1] is not self._last:
            return False
        for _ in range(min(_AUDITED, closed)):
            self._turn = (self._turn + 1) % closed
            if hash(encode_json(entries[self._turn])) != self._hashes[self._turn]:
                if not self._warned:
                    self._warned = True
                    log.warning(
                        "entry %d of a GrowingList was changed after it was saved. The whole list is encoded "
                        "again; steps saved since the change may hold the old entry. Name the list itself if "
                        "its entries change",
                        self._turn,
                    )
                return False
        return True

    def _close(self, entry: Any, text: bytes) -> None:
        self._texts.append(text)
        self._hashes.append(hash(text))
        self._num_bytes += len(text)
        self._last = entry
        if self._num_bytes < _BLOCK_BYTES:
            return
        self._blocks.append(zlib.compress(b"\n".join(self._texts), _LEVEL))
        self._texts, self._num_bytes = [], 0
        # Like the carry of a binary counter: each byte is copied once for each doubling of the list.
        while len(self._blocks) > 1 and len(self._blocks[-2]) < 2 * len(self._blocks[-1]):
            last = self._blocks.pop()
            self._blocks[-1] += last


def _streams(block: bytes) -> Iterator[bytes]:
    """Yield the decompressed streams of a block. Raises ValueError if it is damaged."""
    while block:
        stream = zlib.decompressobj()
        try:
            text = stream.decompress(block, MAX_VALUES_BYTES)
        except zlib.error as error:
            raise ValueError(f"a block of entries is damaged: {error}") from error
        if not stream.eof:
            raise ValueError("a block of entries is truncated or too large")
        yield text
        block = stream.unused_data


def _decoded(texts: list[bytes]) -> list[Any]:
    found = decode_json(b"[" + b",".join(texts) + b"]")
    if not isinstance(found, list) or len(found) != len(texts):
        raise ValueError("a block of entries does not hold one entry a line")
    return found
