"""The parts of a step: their files, read and checked one by one, and those of a committed step, of which one
is in memory at a time. Knows nothing of the order of writes; see steps.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from flashckpt._native import xxh3_128
from flashckpt.errors import DamagedError
from flashckpt.format.checked_json import FORMAT, TAIL_BYTES, checked, checksum_in
from flashckpt.format.names import PART, AttemptName
from flashckpt.format.records import Manifest, Part, PartHead, PartRecord
from flashckpt.store.base import Entry, LengthError, Store

# Parts that have no more together are read whole before a manifest names them, of others the heads alone.
_FEW_BYTES = 16 << 20
# The head of a part of eight ranks is a few KiB.
_HEAD_BYTES = 64 << 10


class StepParts:
    """In the order of a manifest. Each is read when it is asked for, and kept until another is: those of
    thousands of ranks together take gigabytes. `heads` are those of all."""

    def __init__(self, heads: Sequence[PartHead], read: Callable[[int], Part]) -> None:
        """`read` gives the part of a place in `heads`, and raises where it is not the step's."""
        self.heads, self._read = heads, read
        self._places = {rank.rank: place for place, head in enumerate(heads) for rank in head.ranks}
        self._kept: tuple[int, Part] | None = None

    @classmethod
    def of(cls, parts: Iterable[Part]) -> StepParts:
        """Of parts that are in memory, and stay there."""
        held = tuple(parts)
        return cls([part.head() for part in held], held.__getitem__)

    def __len__(self) -> int:
        return len(self.heads)

    def __iter__(self) -> Iterator[Part]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, place: int) -> Part:
        if self._kept is None or self._kept[0] != place:
            self._kept = None  # or there were two
            self._kept = place, self._read(place)
        return self._kept[1]

    def of_rank(self, rank: int) -> Part | None:
        """The part that holds a rank, None where none does."""
        place = self._places.get(rank)
        return None if place is None else self[place]


def part_paths(store: Store, folder: str) -> list[str]:
    """The parts in a step's folder, whole or not."""
    return [f"{folder}/{entry.name}" for entry in part_entries(store, folder)]


def part_entries(store: Store, folder: str) -> list[Entry]:
    entries = store.list(folder)
    return [entry for entry in entries if not entry.is_folder and PART.fullmatch(entry.name)]


def are_few(parts: Sequence[Entry | PartRecord]) -> bool:
    return sum(part.num_bytes for part in parts) <= _FEW_BYTES


class KnownHeads:
    """The heads of one step that were read, for who looks again and again until all are there: a part never
    changes, and is read once. Those of another step take their place."""

    def __init__(self) -> None:
        self._folder = ""
        self._read: dict[tuple[str, int, float], tuple[PartHead, str]] = {}

    def of(self, store: Store, folder: str, entry: Entry, *, whole: bool) -> tuple[PartHead, str]:
        """As `read_head` gives it, of a part in a step's folder."""
        if folder != self._folder:
            self._folder, self._read = folder, {}
        key = entry.name, entry.num_bytes, entry.modified_s
        if key not in self._read:
            self._read[key] = read_head(store, f"{folder}/{entry.name}", entry.num_bytes, whole=whole)
        return self._read[key]


def read_heads(
    store: Store, folder: str, step: int, attempt: AttemptName, world: int, known: KnownHeads | None = None
) -> tuple[list[PartRecord], list[PartHead]]:
    rows, heads, known = [], [], known or KnownHeads()
    entries = part_entries(store, folder)
    is_whole = are_few(entries)
    for entry in entries:
        head, checksum = known.of(store, folder, entry, whole=is_whole)
        if (head.step, head.attempt, head.world, head.file) != (step, attempt, world, entry.name):
            path = f"{folder}/{entry.name}"
            raise damaged(path, "it is a part of another step, attempt, world or keeper", step)
        rows.append(PartRecord(file=entry.name, num_bytes=entry.num_bytes, checksum=checksum))
        heads.append(head)
    ranks = [rank.rank for head in heads for rank in head.ranks]
    if len(set(ranks)) != len(ranks):
        raise damaged(folder, "two parts hold the same rank", step)
    return rows, heads


def read_head(store: Store, path: str, num_bytes: int, *, whole: bool) -> tuple[PartHead, str]:
    """The head of a part, and the checksum that ends it. `whole`: every byte is read, and checked."""
    if not whole:
        try:
            first = store.read_bytes(path, 0, min(num_bytes, _HEAD_BYTES))
            head = PartHead.from_prefix(first, path)
            if head is not None and len(first) < num_bytes:
                first = store.read_bytes(path, num_bytes - TAIL_BYTES, TAIL_BYTES)
            if head is not None:
                return head, checksum_in(first, what=path)
        except LengthError as error:
            raise DamagedError(str(error), path=path) from error
    data = store.read(path, Part.MAX_BYTES)
    return Part.from_bytes(data, path).head(), checksum_in(data, what=path)


def head_of(data: bytes, path: str) -> PartHead:
    """The head of a part of which all bytes are here, looked into no further where it can be."""
    return PartHead.from_prefix(data[:_HEAD_BYTES], path) or Part.from_bytes(data, path).head()


def read_part(store: Store, folder: str, row: PartRecord, manifest: Manifest) -> Part:
    path = f"{folder}/{row.file}"
    part = Part.from_bytes(read_named(store, folder, row, manifest), path)
    check_of(part, manifest, path)
    return part


def check_of(part: Part | PartHead, manifest: Manifest, path: str) -> None:
    if (part.step, part.attempt, part.world) != (manifest.step, manifest.attempt, manifest.world):
        raise damaged(path, "it is a part of another step, attempt or world", manifest.step)


def read_named(store: Store, folder: str, row: PartRecord, manifest: Manifest) -> bytes:
    return read_named_bytes(store, folder, row, manifest.step, version=manifest.format)


def read_named_bytes(
    store: Store, folder: str, row: PartRecord, step: int, *, version: int = FORMAT
) -> bytes:
    """A part's bytes, which have the length and the checksum that a manifest of this version says, or is to
    say."""
    path = f"{folder}/{row.file}"
    try:
        data = store.read(path, row.num_bytes)
    except FileNotFoundError:
        raise damaged(path, "it is missing", step) from None
    found = xxh3_128(data).hex() if version == 1 else checked(data, what=path)
    if len(data) != row.num_bytes or found != row.checksum:
        raise damaged(path, "it is not the part that was written", step)
    return data


def damaged(path: str, why: str, step: int) -> DamagedError:
    return DamagedError(
        f"{path} is damaged: {why}. Nothing of it was used, older steps are untouched. "
        "Run `flashckpt verify` on the run to see which steps are whole.",
        step=step,
        path=path,
    )
