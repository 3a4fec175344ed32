"""A committed step for one rank: what it consists of, and the read of its bytes, straight into live tensors
or into new ones. Owns the memory that a read takes, and which files are read past the page cache."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence, Set
from types import MappingProxyType

import torch
from torch import Tensor

from flashckpt.capture.devices import digest_tensors
from flashckpt.commit.steps import StepRecord
from flashckpt.errors import OutOfSpaceError
from flashckpt.format.layout import Leaf
from flashckpt.format.records import Contents
from flashckpt.format.typed import decode
from flashckpt.memory import memory_budget
from flashckpt.restore.snapshot import Snapshot
from flashckpt.restore.step_tensors import Parts, Piece, TensorSlice, complete_piece
from flashckpt.restore.whole_tensors import take
from flashckpt.state.tensors import TORCH_DTYPES
from flashckpt.store.read_plan import ReadPlan, Source, damaged


class StepReading:
    """The bytes of a step that a rank takes.

    snapshot: without tensors and digests until `read` has returned. parts: by the leaf's name, the pieces in
        files that make it up. buffered: files that other ranks of the node read, too, and that are therefore
        read through the page cache.
    """

    def __init__(self, snapshot: Snapshot, parts: Mapping[str, Parts], buffered: Iterable[str] = ()) -> None:
        self.snapshot, self._parts, self._buffered = snapshot, parts, frozenset(buffered)

    @classmethod
    def of_own(cls, record: StepRecord, rank: int, *, is_alone: bool) -> StepReading:
        """Return the step for `rank`, which made it with the layout of now. is_alone: no other rank is on
        this node. Raises DamagedError for malformed records."""
        mine, own = record.rank(rank), [path for path, _ in record.files(rank)]
        leaves = [leaf for _, leaf, _ in (*mine.counted(), *mine.elsewhere())]
        pieces = dict[str, Piece]()
        for leaf, stored in zip(leaves, record.leaves(rank), strict=True):
            pieces[leaf.name] = Piece(TensorSlice.of(stored.leaf), rank, *stored)
        snapshot = Snapshot(
            step=record.step,
            attempt=record.attempt,
            boundary=record.boundary,
            tier="local",
            leaves={leaf.name: leaf for leaf in leaves},
            values=decode(dict(mine.values)),
            constants=frozenset(name for name, piece in pieces.items() if piece.path in own[1:]),
        )
        # Ranks that hold the same leaves read each other's files.
        is_shared = bool(mine.replicas) and not is_alone
        buffered = {piece.path for piece in pieces.values()} - (set() if is_shared else set(own))
        parts = {name: [(piece, piece.region)] for name, piece in pieces.items()}
        return cls(snapshot, parts, buffered)

    @property
    def files(self) -> Mapping[str, Contents]:
        """The files that it reads, by path."""
        return {piece.path: piece.contents for parts in self._parts.values() for piece, _ in parts}

    def read(
        self, source: Source, threads: int, targets: Mapping[str, Tensor] = MappingProxyType({})
    ) -> Snapshot:
        """Read the bytes of each leaf into the live tensor that `targets` has for it, else into a new one,
        and return the snapshot with these tensors. Each chunk is verified before a byte of it is copied.

        Raises what `ReadPlan.run` does, and OutOfSpaceError before anything is read; a second call reads all
        again."""
        snapshot = self.snapshot
        new = [leaf for name, leaf in snapshot.leaves.items() if name not in targets]
        tensors = dict(targets) | new_tensors(new, f"Step {snapshot.step}")
        rows = list[tuple[Leaf, Parts, Tensor]]()
        try:
            rows += [(leaf, self._parts[name], tensors[name]) for name, leaf in snapshot.leaves.items()]
            try:
                found = read_into(rows, source, threads, self._buffered)
            finally:
                for target in targets.values():
                    torch.autograd.graph.increment_version(target)
            snapshot.digests.update(found)
        except BaseException:
            rows.clear()  # the error's traceback may be kept, and these tensors with it
            tensors.clear()
            raise
        snapshot.tensors.update(tensors)
        snapshot.own.update(leaf.name for leaf in new)
        return snapshot


def new_tensors(leaves: Iterable[Leaf], what: str) -> dict[str, Tensor]:
    """Return a new row-major host tensor for each leaf, by name. what: for the error. Raises
    OutOfSpaceError."""
    leaves = list(leaves)
    needed = sum(leaf.num_bytes for leaf in leaves)
    check_memory(needed, what)
    try:
        return {
            leaf.name: torch.empty(leaf.shape, dtype=TORCH_DTYPES[leaf.dtype], device="cpu")
            for leaf in leaves
        }
    except RuntimeError as error:  # torch gives no errno
        raise _too_large(what, needed, 0) from error


def check_memory(needed: int, what: str) -> None:
    """Raise OutOfSpaceError if it takes more bytes of host memory than there are."""
    available = memory_budget.available_bytes()
    if needed > available:
        raise _too_large(what, needed, available)


def _too_large(what: str, needed: int, available: int) -> OutOfSpaceError:
    return OutOfSpaceError(
        f"{what} needs {needed:,} bytes of host memory to be loaded, and {available:,} may be taken "
        "here (the least of what the machine and every cgroup above this process leave, less a margin). "
        "Nothing of it was loaded. Give the job more memory, use fewer loader workers, spread the state over "
        "more ranks, or free the memory that a keeper holds for a run: `flashckpt keepers --end RUN` saves "
        "first what storage lacks.",
        needed=needed,
        available=available,
    )


def read_into(
    rows: Sequence[tuple[Leaf, Parts, Tensor]], source: Source, threads: int, buffered: Set[str] = frozenset()
) -> dict[str, int]:
    """Read leaves, each from the pieces that make it up, into contiguous host tensors, and return their
    digests. buffered: files that are read through the page cache. Raises what `ReadPlan.run` does."""
    plan, complete = _planned(rows, buffered)
    plan.run(source, threads)
    # In place: one more pass costs less than a digest of each chunk in its buffer.
    digests = digest_tensors([tensor for _, _, tensor in rows], threads)
    found = {leaf.name: digest for (leaf, _, _), digest in zip(rows, digests, strict=True)}
    for name, piece in complete.items():
        if piece.digest != found[name]:
            raise damaged(source.url, piece.path, f"{name} is not what was captured")
    return found


def _planned(
    rows: Sequence[tuple[Leaf, Parts, Tensor]], buffered: Set[str]
) -> tuple[ReadPlan, dict[str, Piece]]:
    """Return the plan of a read, and the pieces that are whole leaves, by name. A function of its own: the
    traceback of a failed read holds the frame of the caller, and no tensor may stay in that."""
    plan, complete = ReadPlan(buffered=buffered), dict[str, Piece]()
    for leaf, parts, tensor in rows:
        take(plan, leaf, host_bytes(tensor), parts)
        if (piece := complete_piece(leaf, parts)) is not None:
            complete[leaf.name] = piece
            continue
        # Of a leaf that is assembled, each piece has a digest.
        for piece, common in parts:
            if common == piece.region:
                plan.digest(piece.path, piece.contents, piece.leaf, piece.digest)
    return plan, complete


def read_leaves(wanted: Sequence[tuple[Leaf, Parts]], record: StepRecord, threads: int) -> dict[str, Tensor]:
    """Read leaves of a step, each from the pieces that make it up, into new tensors, by name. Raises
    OutOfSpaceError and what `ReadPlan.run` does."""
    found = new_tensors([leaf for leaf, _ in wanted], f"Step {record.step}")
    read_into([(leaf, parts, found[leaf.name]) for leaf, parts in wanted], record.store, threads)
    return found


def host_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous host tensor; it does not keep the tensor."""
    num_bytes = tensor.numel() * tensor.element_size()
    if not num_bytes:
        return memoryview(bytearray())
    return memoryview((ctypes.c_ubyte * num_bytes).from_address(tensor.data_ptr())).cast("B")
