"""The leaves that an export takes from a step: which ones, under which names, and their verified bytes in
pieces.

Needs no torch, except to change a dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from flashckpt.commit.steps import StepRecord
from flashckpt.errors import NoSuchStepError, OptionError
from flashckpt.format.layout import Leaf
from flashckpt.restore.box_reading import BoxReader
from flashckpt.restore.state_names import entry_of, transient_names
from flashckpt.restore.whole_tensors import WholeTensors

# Dtypes that a cast reads and writes. A float8 tensor has a scale elsewhere: a cast alone would change its
# value.
CASTABLE = ("bfloat16", "float16", "float32", "float64")
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
_THREADS = 2


class SelectedLeaf(Protocol):
    """One tensor to export. `leaf` has the names, dtype and shape that the export gives it."""

    @property
    def leaf(self) -> Leaf: ...

    @property
    def place(self) -> tuple[str, int]:
        """Sorts leaves in the order in which reading them is fastest."""

    def pieces(self) -> Iterator[memoryview]:
        """Its bytes in order, row-major. Each piece is verified by its chunks' checksums before it is given.
        The last step raises DamagedError where a digest does not match."""


@dataclass(frozen=True, slots=True)
class StoredLeaf:
    """A leaf from the file of one rank, which stores it as `stored`."""

    reader: BoxReader
    leaf: Leaf
    stored: Leaf
    place: tuple[str, int]

    def pieces(self) -> Iterator[memoryview]:
        return self.reader.pieces(self.stored)

    def check(self, digest: int) -> None:
        """Raise DamagedError where the digest of the bytes that were read is not that of the capture."""
        self.reader.check(self.stored, digest)


@dataclass(frozen=True, slots=True)
class WholeLeaf:
    """A tensor assembled from the pieces of several ranks, which the step knows as `stored`."""

    tensors: WholeTensors
    leaf: Leaf
    stored: Leaf

    @property
    def place(self) -> tuple[str, int]:
        return self.stored.name, 0

    def pieces(self) -> Iterator[memoryview]:
        return self.tensors.pieces(self.stored, _THREADS)


@dataclass(frozen=True, slots=True)
class CastLeaf:
    """A floating-point leaf in another dtype, that of `leaf`."""

    source: SelectedLeaf
    leaf: Leaf

    @property
    def place(self) -> tuple[str, int]:
        return self.source.place

    def pieces(self) -> Iterator[memoryview]:
        import torch

        before, after = getattr(torch, self.source.leaf.dtype), getattr(torch, self.leaf.dtype)
        for piece in filter(len, self.source.pieces()):
            # A piece never ends inside an element: chunks and leaves begin at multiples of 8 bytes.
            values = torch.frombuffer(bytearray(piece), dtype=before).to(after)
            yield values.view(torch.uint8).numpy().data


@dataclass(frozen=True, slots=True)
class Names:
    """The names of an export. only: parts of the state or leaves, all if empty. prefix: removed from each
    name, "model." where the export is of one module. excluded: leaves that are not exported."""

    only: tuple[str, ...] = ()
    prefix: str = ""
    excluded: frozenset[str] = frozenset()

    @classmethod
    def of(cls, record: StepRecord, only: Sequence[str]) -> Names:
        """Where `only` is one module or a part of one, names are those that the module gives. Buffers that
        are not persistent are excluded unless `only` names them; so are tensors inside a module's extra
        state, which has no name of its own in a file of tensors."""
        excluded = transient_names(record) - set(only)
        if len(only) != 1:
            return cls(tuple(only), excluded=excluded)
        _, entry = entry_of(record, 0, only[0])
        if entry.get("kind") != "module":
            return cls(tuple(only), excluded=excluded)
        inside = tuple(f"{path}._extra_state{mark}" for path in entry.get("extra", {}) for mark in ".[")
        return cls(tuple(only), f"{only[0]}.", excluded | _Within(inside).names(record))

    def of_leaf(self, leaf: Leaf) -> Leaf | None:
        """The leaf under its exported names: a tied tensor may have other names elsewhere. None if it has
        none."""
        names = [name for name in (leaf.name, *leaf.aliases) if self._has(name)]
        if not names:
            return None
        names = [name if name in self.only else name.removeprefix(self.prefix) for name in names]
        return replace(leaf, name=names[0], aliases=tuple(names[1:]), box=None, offset=-1)

    def _has(self, name: str) -> bool:
        if name in self.excluded:
            return False
        return not self.only or any(name == each or name.startswith(f"{each}.") for each in self.only)


@dataclass(frozen=True, slots=True)
class _Within:
    prefixes: tuple[str, ...]

    def names(self, record: StepRecord) -> frozenset[str]:
        """The leaves of a step whose names begin so."""
        if not self.prefixes:
            return frozenset()
        leaves = (leaf for part in record.parts for rank in part.ranks for _, leaf, _ in rank.counted())
        return frozenset(
            n for leaf in leaves for n in (leaf.name, *leaf.aliases) if n.startswith(self.prefixes)
        )


def select(record: StepRecord, only: Sequence[str], dtype: str | None) -> list[SelectedLeaf]:
    """Return the tensors of a step, each whole. Raises NoSuchStepError where no tensor has such a name."""
    names = Names.of(record, only)
    found = _stored(record, 0, names) if record.world == 1 else _assembled(record, names)
    return found if dtype is None else [_cast(each, dtype) for each in found]


def select_rank(record: StepRecord, rank: int, only: Sequence[str], dtype: str | None) -> list[SelectedLeaf]:
    """What the files of one rank hold, as it stands there."""
    found = _stored(record, rank, Names(tuple(only)))
    return found if dtype is None else [_cast(each, dtype) for each in found]


def dtype_name(dtype: object) -> str:
    """The name of a floating-point dtype that is given as text ("bf16", "torch.bfloat16") or as torch's
    object. OptionError for any other."""
    text = str(dtype).removeprefix("torch.")
    name = _SHORT.get(text, text)
    if name not in CASTABLE:
        raise OptionError(f"dtype={dtype!r}: one of {', '.join(CASTABLE)}. Nothing was written.")
    return name


def only_module(record: StepRecord, only: Sequence[str], format: str) -> str:
    """The name of the module that is exported: the one that `only` names, or the only one of the state."""
    value, entry = entry_of(record, 0, only[0] if only else "")
    modules: list[str] = [name for name, each in value["entries"].items() if each["kind"] == "module"]
    if len(only) == 1 and entry.get("kind") == "module":
        return only[0]
    if not only and len(modules) == 1:
        return modules[0]
    raise OptionError(
        f"format={format!r} exports one module, and step {record.step} has {', '.join(modules) or 'none'}. "
        "Nothing was written. Name one of them with --only."
    )


def _stored(record: StepRecord, rank: int, names: Names) -> list[SelectedLeaf]:
    readers = {
        contents.shard.file: BoxReader(record.store, path, contents) for path, contents in record.files(rank)
    }
    found: list[SelectedLeaf] = []
    leaves = []
    for file, leaf, _ in record.rank(rank).counted():
        leaves.append(leaf)
        if (taken := names.of_leaf(leaf)) is not None:
            found.append(StoredLeaf(readers[file], taken, leaf, (file, leaf.offset)))
    return found or _refuse(record, names.only, leaves)


def _assembled(record: StepRecord, names: Names) -> list[SelectedLeaf]:
    tensors = WholeTensors(record)
    pairs = [(names.of_leaf(leaf), leaf) for leaf in tensors.leaves]
    found: list[SelectedLeaf] = [
        WholeLeaf(tensors, taken, leaf) for taken, leaf in pairs if taken is not None
    ]
    return found or _refuse(record, names.only, tensors.leaves)


def _cast(source: SelectedLeaf, dtype: str) -> SelectedLeaf:
    if source.leaf.dtype not in CASTABLE or source.leaf.dtype == dtype:
        return source
    return CastLeaf(source, replace(source.leaf, dtype=dtype))


def _refuse(record: StepRecord, only: Sequence[str], leaves: Iterable[Leaf]) -> list[SelectedLeaf]:
    there = sorted({leaf.name.partition(".")[0] for leaf in leaves})
    raise NoSuchStepError(
        f"step {record.step} has no leaf under {' or '.join(only) or 'any name'}. Nothing was written. "
        f"It has: {', '.join(there)}.",
        step=record.step,
    )
