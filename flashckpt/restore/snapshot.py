"""A snapshot in memory, verified: what each tier returns and each restore takes; and the two turns in which a
step is read from storage (`StepReading`)."""

from __future__ import annotations

import logging
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from flashckpt import _native
from flashckpt.commit.steps import FileLeaf, StepRecord
from flashckpt.errors import DamagedError
from flashckpt.format.layout import Leaf, SlotImage
from flashckpt.format.names import AttemptName
from flashckpt.format.records import Contents
from flashckpt.format.typed import decode
from flashckpt.restore.step_image import Place, StepImage, StepMemory, add_leaves, layout_of
from flashckpt.state.tree import Saved
from flashckpt.store.read_plan import ReadPlan, Source

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The verified state of one rank: of `boundary` of `attempt`, at `step`.

    image: a writable buffer with the leaves of `layout`, except constants, which are in `constants_image`,
        and leaves left to other ranks of the node. left: of each of the latter its place.
    digests: of `layout.leaves`. values: everything that is not a tensor, decoded.
    at_rest, memory: the memory that `discard` releases, if it was read from storage or from the cache.
    untaken: leaves of a step of another layout that have no place on this rank; elsewhere: those of them that
        belong to modules, so that another rank must have a place for them.
    """

    step: int
    attempt: AttemptName
    boundary: int
    tier: str
    layout: SlotImage
    digests: Sequence[int]
    values: dict[str, Any]
    image: memoryview = field(repr=False)
    constants_image: memoryview | None = field(default=None, repr=False)
    left: Sequence[Place] = field(default=(), repr=False)
    at_rest: StepImage | None = field(default=None, repr=False)
    memory: StepMemory | None = field(default=None, repr=False)
    untaken: tuple[str, ...] = field(default=(), repr=False)
    elsewhere: tuple[str, ...] = field(default=(), repr=False)

    @classmethod
    def of(cls, found: StepImage) -> Snapshot:
        """Return the snapshot in an image. Raises DamagedError for malformed values."""
        record, [(image, _), *constants] = found.record, found.held
        layout, digests = layout_of(record, found.rank)
        return cls(
            step=record.step,
            attempt=record.attempt,
            boundary=record.boundary,
            tier="local",
            layout=layout,
            digests=digests,
            values=decode(dict(record.rank(found.rank).values)),
            image=image,
            constants_image=constants[0][0] if constants else None,
            left=found.places_of(layout.left),
            at_rest=found,
        )

    def discard(self) -> None:
        """Release the memory that was read into now, even if references to this object remain."""
        for each in (self.at_rest, self.memory):
            if each is not None:
                each.discard()

    @property
    def world(self) -> int:
        """The number of ranks that made it."""
        environment = self.values.get("environment")
        found = environment.get("world", 1) if isinstance(environment, dict) else 1
        return found if type(found) is int else 1

    @property
    def names(self) -> frozenset[str]:
        """Every name of every leaf."""
        return frozenset(name for leaf in self.layout.leaves for name in (leaf.name, *leaf.aliases))

    def section(self, name: str) -> dict[str, Any]:
        """Return one section of the values. Raises DamagedError if it is missing."""
        section = self.values.get(name)
        if not isinstance(section, dict):
            raise DamagedError(
                f"The snapshot of step {self.step} has no {name!r} among its values. Nothing was loaded.",
                step=self.step,
            )
        return section

    def tensor(self, name: str) -> torch.Tensor:
        """Return a view of a leaf's bytes in the image, row-major, in its true dtype. Valid until a later
        snapshot overwrites the image."""
        return leaf_view(*self._places[name])

    @cached_property
    def digests_by_name(self) -> dict[str, int]:
        gone = self.layout.outdated
        rows = enumerate(zip(self.layout.leaves, self.digests, strict=True))
        return {leaf.name: digest for index, (leaf, digest) in rows if index not in gone}

    @property
    def constants(self) -> frozenset[str]:
        """The names of the leaves that were constants at the capture."""
        first, gone = self.layout.first_constant, self.layout.outdated
        rows = enumerate(self.layout.leaves)
        return frozenset(leaf.name for i, leaf in rows if i >= first and i not in gone)

    @cached_property
    def saved(self) -> Saved:
        """The state to compare the live state with and to restore it from; the same object each time."""
        places = self._places
        leaves = {name: leaf for name, (_, leaf, _) in places.items()}

        def tensor(name: str) -> torch.Tensor:
            # Not `self.tensor`: a cycle with this object would keep the image until garbage collection.
            return leaf_view(*places[name])

        return Saved(leaves=leaves, value=self.section("state"), tensor=tensor)

    def places(self) -> list[tuple[memoryview, Leaf, int]]:
        """Return the buffer, the leaf and the first byte of each of `layout.leaves`."""
        layout, found = self.layout, []
        for index, (leaf, start) in enumerate(zip(layout.leaves, layout.starts(), strict=True)):
            image: memoryview | None = self.image
            if index >= layout.first_constant:
                image = self.constants_image
            elif index >= layout.first_left:
                image, start = self.left[index - layout.first_left]
            assert image is not None
            found.append((image, leaf, start))
        return found

    @cached_property
    def _places(self) -> dict[str, tuple[memoryview, Leaf, int]]:
        gone = self.layout.outdated
        return {row[1].name: row for index, row in enumerate(self.places()) if index not in gone}


def leaf_view(image: memoryview, leaf: Leaf, start: int) -> torch.Tensor:
    """Return the leaf whose bytes begin at `start` as a tensor of its true dtype and shape, row-major."""
    dtype: torch.dtype = getattr(torch, leaf.dtype)
    if leaf.num_bytes == 0:
        return torch.empty(leaf.shape, dtype=dtype, device="cpu")
    return torch.frombuffer(image, dtype=dtype, count=math.prod(leaf.shape), offset=start).view(leaf.shape)


class StepReading:
    """The rest of a step to read, in two turns: first what needs no other rank of the node, then the rest,
    from the memory of other ranks or from storage.

    whole: by name, leaves that are a complete leaf of a file; they are used in place if another rank has read
        them. plan: reads the other leaves into the image. made: returns the snapshot once all is read.
    """

    def __init__(
        self,
        image: StepImage,
        made: Callable[[], Snapshot],
        whole: Mapping[str, FileLeaf],
        plan: ReadPlan | None = None,
    ) -> None:
        self.image, self._made, self._whole = image, made, whole
        self._plan = ReadPlan() if plan is None else plan
        self._is_located = False

    @classmethod
    def of_own(cls, image: StepImage) -> StepReading:
        """Return the rest of a step that was made with the layout of this rank."""
        whole = {name: each for name, each in image.borrowed().items() if name not in image.places}
        return cls(image, lambda: Snapshot.of(image), whole)

    @property
    def record(self) -> StepRecord:
        return self.image.record

    def held(self) -> dict[str, tuple[Contents, int]]:
        """Return the files in memory, whole and verified, by path, with the first byte of each in the shared
        memory."""
        if not self.image.held:
            return {}
        files = zip(self.record.files(self.image.rank), self.image.held, strict=True)
        return {path: (contents, start) for (path, contents), (_, start) in files}

    def needs(self) -> dict[str, tuple[Contents, list[tuple[int, int]]]]:
        """Return the chunks to read of each file, as runs (first chunk, chunk after the last), ascending."""
        wanted = ReadPlan()
        for path, contents, leaf, digest in self._whole.values():
            wanted.digest(path, contents, leaf, digest)
        found: dict[str, tuple[Contents, list[tuple[int, int]]]] = {}
        for path, contents, first, last in (*wanted.needs(), *self._plan.needs()):
            found.setdefault(path, (contents, []))[1].append((first, last))
        return {path: (contents, _merged(runs)) for path, (contents, runs) in found.items()}

    def locate(self, place: Callable[[FileLeaf], Place | None], threads: int) -> None:
        """Use leaves at the `place` in another rank's memory, if their digests match there; take memory for
        the others. Raises OutOfSpaceError."""
        found = {name: at for name, leaf in self._whole.items() if (at := place(leaf)) is not None}
        wrong = self._wrong(found, threads)
        if wrong:
            log.warning(
                "step %d: %d leaves in the memory of other ranks of this node are not what was committed; "
                "this rank reads them from storage", self.record.step, len(wrong),
            )  # fmt: skip
        self.image.places.update((name, at) for name, at in found.items() if name not in wrong)
        rest = {name: each for name, each in self._whole.items() if name not in self.image.places}
        add_leaves(self._plan, self.image, rest)
        self._is_located = True

    def finish(self, source: Source, threads: int) -> Snapshot:
        """Read the rest. If another source than the step's store has damaged bytes, they are read from the
        store. Raises what `ReadPlan.run` does, OutOfSpaceError and MismatchError; may be retried."""
        if not self._is_located:
            self.locate(lambda _: None, threads)
        store = self.record.store
        try:
            self._plan.run(source, threads)
        except DamagedError as error:
            if source is store:
                raise
            log.warning("step %d is read from storage by this rank alone: %s", self.record.step, error)
            self._plan.run(store, threads)
        return self._made()

    def drop(self) -> None:
        """Release the memory: the step is not taken."""
        self.image.discard()

    def _wrong(self, places: Mapping[str, Place], threads: int) -> set[str]:
        sizes = array("Q", [self._whole[name].leaf.num_bytes for name in places])
        addresses = array("Q", [_native.address_of(view) + start for view, start in places.values()])
        found = array("Q", bytes(8 * len(sizes)))
        if places:
            _native.digest_many(addresses, sizes, _native.address_of(found), max(1, threads))
        rows = zip(places, found, strict=True)
        return {name for name, digest in rows if digest != self._whole[name].digest}


def _merged(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge runs that overlap."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(runs):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(last, found[-1][1])
        else:
            found.append((first, last))
    return found
