"""The constants of a snapshot, on storage: written once an attempt, or linked from the attempt before.

Owns the choice between using, linking and writing a constants shard, and the audit of the bytes it
writes. Publishes no part: the writer does, after the shard is whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace

from flashckpt.commit import constants
from flashckpt.errors import DamagedError, FlashckptError, KeeperError
from flashckpt.format.layout import Layout
from flashckpt.format.metadata import Metadata
from flashckpt.format.names import AttemptName, attempt_folder
from flashckpt.format.records import Contents, ShardRecord
from flashckpt.memory.constants import not_held
from flashckpt.memory.slot import Slot
from flashckpt.persist.audit import check_header, torn, unlike
from flashckpt.persist.job import SealedSnapshot
from flashckpt.store.base import Region, Store, Written

_NAMES_TRIED = 8
REGION_IS_GONE = (
    "the constants of this snapshot are not in this node's memory, and no committed step names them; "
    "committed steps are not touched"
)


class RegionGone(KeeperError):
    """The region that a snapshot names is not here: only a trainer that has it could hand it over."""


class ConstantsShards:
    """Constants shards that this keeper wrote, linked or found named by a committed step. `progress` is
    the address of a word that counts bytes."""

    def __init__(self, store: Store, threads: int, progress: int) -> None:
        self._store = store
        self._threads = threads
        self._progress = progress
        # The newest of each rank alone: an older one may be deleted once no part names it.
        self._known: dict[int, tuple[AttemptName, Contents]] = {}

    def shard_for(
        self,
        snapshot: SealedSnapshot,
        metadata: Metadata,
        attempt: AttemptName,
        is_held: Callable[[], None],
        *,
        is_alone: bool = False,
    ) -> tuple[Contents | None, int]:
        """The constants shard of `attempt` that holds a snapshot's constants, and the bytes written for it:
        0 where it stood already or was linked. None for one without constants.

        The digests in the slot are of the live tensors at its boundary, so a file with the same digests
        has its bytes. `is_held` raises where the slot is not this keeper's any more. `is_alone`: nobody else
        may name a constants shard of the attempt. Then those that keepers left which died go before another
        is written: they may be the room for it. Raises Torn where the bytes in memory are needed and are not
        those of the boundary, RegionGone where they are needed and their region is not here, OSError,
        FlashckptError.
        """
        layout = metadata.constants
        if layout is None:
            return None, 0
        digests = tuple(metadata.digests[len(metadata.layout.leaves) :])
        rank = snapshot.rank
        found = self._standing(attempt, rank, layout, digests)
        num_bytes = 0
        if found is None:
            if is_alone:
                self._clear(attempt, rank, is_held)
            found = self._written(snapshot, metadata, layout, attempt)
            num_bytes = layout.num_bytes
            try:
                is_held()
            except BaseException:
                self._remove(attempt, found.shard.file)
                raise
        self._known[rank] = attempt, found
        return found, num_bytes

    def _standing(
        self, attempt: AttemptName, rank: int, layout: Layout, digests: tuple[int, ...]
    ) -> Contents | None:
        known, contents = self._known.get(rank, (None, None))
        is_mine = contents is not None and known == attempt and constants.is_of(contents, layout, digests)
        if contents is not None and is_mine and constants.is_there(self._store, attempt, contents):
            return contents
        for source, contents in constants.named(self._store, attempt, rank):
            if not constants.is_of(contents, layout, digests):
                continue
            if source == attempt:
                return contents
            name = constants.link(
                self._store, source, contents, attempt, rank,
                threads=self._threads, progress_word=self._progress,
            )  # fmt: skip
            if name is not None:
                return replace(contents, shard=replace(contents.shard, file=name))
        return None

    def _written(
        self, snapshot: SealedSnapshot, metadata: Metadata, layout: Layout, attempt: AttemptName
    ) -> Contents:
        first = len(metadata.layout.leaves)
        sources = snapshot.sources(metadata)
        region = next((each.region for each in sources if first in each.leaves), None)
        if region is None:
            raise RegionGone(REGION_IS_GONE)
        if absent := not_held(region, metadata):
            raise torn(metadata, absent)
        check_header(region, layout)
        name, written = self._create(region, layout, snapshot.rank, attempt)
        leaves = unlike(metadata, written.digests, first)
        if leaves:
            self._remove(attempt, name)
            raise torn(metadata, leaves)
        shard = ShardRecord.of(name, layout, written.checksums)
        return Contents(shard=shard, leaves=layout.leaves, digests=tuple(metadata.digests[first:]))

    def _create(self, region: Slot, layout: Layout, rank: int, attempt: AttemptName) -> tuple[str, Written]:
        """Write the image under a name that nobody has: a keeper that was stopped may still be writing the
        one it took, and wakes up."""
        for _ in range(_NAMES_TRIED):
            name = constants.fresh_name(self._store, attempt, rank)
            try:
                return name, self._store.write_shard(
                    f"{attempt_folder(attempt)}/{name}",
                    layout,
                    Region(region.descriptor, region.image_offset),
                    threads=self._threads,
                    progress=self._progress,
                )
            except FileExistsError:
                continue
        raise FileExistsError(f"{attempt_folder(attempt)}: every name for a constants shard was taken")

    def _clear(self, attempt: AttemptName, rank: int, is_held: Callable[[], None]) -> None:
        try:
            names = constants.unnamed_of(self._store, attempt, rank)
        except DamagedError:
            return
        # After the look: what stood then was begun before any keeper that has replaced this one could begin.
        is_held()
        for name in names:
            self._remove(attempt, name)

    def _remove(self, attempt: AttemptName, name: str) -> None:
        with contextlib.suppress(OSError, FlashckptError):
            self._store.remove(f"{attempt_folder(attempt)}/{name}")
