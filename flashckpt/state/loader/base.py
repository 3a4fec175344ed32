"""What the loop needs of a loader, and what all kinds of sources share: the order of events in an epoch.

Owns the place where random numbers are put back: just before the batch at which the run was cut is fetched.
Never decides where batches come from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from flashckpt.errors import BoundaryError
from flashckpt.events import log
from flashckpt.format.typed import check_roundtrip
from flashckpt.state import rng
from flashckpt.state.loader.generators import Generators
from flashckpt.state.loader.position import Position
from flashckpt.state.loader.samplers import length_of, made_of, set_epoch

OnReplay = Callable[[int, int], None]


class Source(Protocol):
    """A loader whose position can be saved at every boundary and taken up again.

    batches_taken: of this epoch, those of earlier attempts included.
    """

    @property
    def batches_taken(self) -> int: ...

    @property
    def was_over(self) -> bool:
        """Whether it was taken up where it had given its last batch."""

    def own(self) -> dict[str, Any]:
        """The states of the generators that the loader's parts own, by path."""

    def put_own(self, states: Mapping[str, Any]) -> None:
        """Put back those of them that are named. Raises DamagedError."""

    def begin(
        self,
        epoch: int,
        resume: Mapping[str, Any] | None = None,
        *,
        carry: bool = False,
        leave: frozenset[str] = frozenset(),
        tell_epoch: bool = True,
    ) -> None:
        """Enter an epoch at its start, or where `resume` (a position) was taken.

        A position of the same epoch puts the global random numbers back, here and again just before the
        next batch is fetched. One of an earlier epoch is carried into `epoch`, which starts afresh: the
        loader's own generators and workers are put back, the global random numbers are left alone.

        carry: the same for a position of this epoch, which an earlier phase has left. leave: paths of own
        generators that are not carried. tell_epoch: samplers with `set_epoch` are told `epoch`.
        """

    def next(self) -> Any:
        """The next batch. Raises StopIteration at the epoch's end, and StateError with the first batch where
        the position cannot be saved exactly."""

    def position(self) -> dict[str, Any]:
        """Where the loader stands, as plain values. Meant for boundaries: between two calls of `next`."""

    def has_lost_workers(self) -> bool:
        """Whether a worker process has ended before its time."""

    def __len__(self) -> int:
        """Batches of a whole epoch; TypeError where the loader does not know."""

    def close(self) -> None:
        """End the worker processes; the user's loader stays as it is."""


class EpochSource:
    """The part of a Source that is the same for all kinds. Subclasses fill in the hooks at the end.

    Nothing is drawn before the first `next` of a fresh epoch, so a position at an epoch's start needs
    no more than the random numbers of that boundary.
    """

    kind = ""

    def __init__(self, loader: Any, generators: Generators) -> None:
        self._loader = loader
        self._generators = generators
        self._epoch: int | None = None
        self._taken = 0
        self._over = False
        self._broken = False
        self._iterator: Iterator[Any] | None = None
        self._start: dict[str, Any] | None = None
        self._due: dict[str, Any] | None = None
        self._length = length_of(loader)
        self._made_of = made_of(loader)
        self._tell_epoch = True
        self._was_over = self._can_be_saved = False

    @property
    def batches_taken(self) -> int:
        return self._taken

    @property
    def was_over(self) -> bool:
        return self._was_over

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError(f"{type(self._loader).__name__} does not know its number of batches")
        return self._length

    def own(self) -> dict[str, Any]:
        return self._generators.capture()

    def put_own(self, states: Mapping[str, Any]) -> None:
        self._generators.restore(states)

    def has_lost_workers(self) -> bool:
        # `_workers` are torch's processes; other loaders have none that could be known.
        workers = getattr(self._iterator, "_workers", None)
        return isinstance(workers, list) and any(not worker.is_alive() for worker in workers)

    def begin(
        self,
        epoch: int,
        resume: Mapping[str, Any] | None = None,
        *,
        carry: bool = False,
        leave: frozenset[str] = frozenset(),
        tell_epoch: bool = True,
    ) -> None:
        self._tell_epoch, self._was_over = tell_epoch, False
        if resume is None:
            self._leave()
            self._enter(epoch)
            return
        position = Position.read(resume, self.kind)
        self._check(position)
        self.close()
        if carry or position.epoch != epoch:
            self._carry(position, epoch, leave)
            return
        self._was_over = position.over
        self._take_up(position, carried=False)
        self._restore(position.now)
        self._due = position.now

    def next(self) -> Any:
        if self._broken:
            raise BoundaryError(
                f"The loader failed while it fetched batch {self._taken} of this epoch, so where it stands "
                "is not known. Snapshots taken before are whole. Start the loop again to go on from them."
            )
        if self._due is not None:
            # Again, as the last thing before the fetch: what was drawn since `begin` is no part of the run.
            due, self._due = self._due, None
            self._restore(due)
        if self._over:
            raise StopIteration
        try:
            batch = self._fetch()
            if not self._can_be_saved:
                # Now, and not at the boundary: nobody has trained on anything yet.
                check_roundtrip(self.position(), "loader")
                self._can_be_saved = True
            return batch
        except StopIteration:
            self._over = True
            self._ended()
            raise
        except BaseException:
            self._broken = True
            raise

    def position(self) -> dict[str, Any]:
        over = self._over or self._is_last()
        parts = self._parts(over)
        return Position(
            kind=self.kind,
            epoch=self._epoch,
            batches_taken=self._taken,
            over=over,
            length=self._length,
            made_of=self._made_of,
            start=None if over else self._start,
            now=self._capture() if self._due is None else self._due,
            parts=parts,
        ).plain()

    def close(self) -> None:
        self._iterator = None

    def _fetch(self) -> Any:
        if self._iterator is None:
            self._start = self._capture()
            self._iterator = self._open()
        batch = self._unpack(next(self._iterator))
        self._taken += 1
        return batch

    def _enter(self, epoch: int) -> None:
        self._epoch, self._taken, self._over, self._broken = epoch, 0, False, False
        self._start = self._due = None
        self._length, self._made_of = length_of(self._loader), made_of(self._loader)
        if self._tell_epoch:
            set_epoch(self._loader, epoch)

    def _carry(self, position: Position, epoch: int, leave: frozenset[str]) -> None:
        # Other loops may have run since the position was taken: the global numbers are theirs.
        around, own = rng.capture(), self.own()
        try:
            self._take_up(position, carried=True)
            self._leave()
        finally:
            rng.restore(around)
        carried = {path: own[path] if path in leave else state for path, state in position.now["own"].items()}
        self._generators.restore({**own, **carried})
        self._enter(epoch)

    def _take_up(self, position: Position, *, carried: bool) -> None:
        """Stand where `position` was taken. `carried`: only to go on into a later epoch."""
        if position.epoch is not None:
            self._enter(position.epoch)
        self._taken, self._over = position.batches_taken, position.over
        self._load(position, carried=carried)
        if position.start is not None and not position.over and (self._keeps_workers() or not carried):
            self._start = position.start
            self._reopen(position)

    def _check(self, position: Position) -> None:
        if position.length != self._length and None not in (position.length, self._length):
            log.warning(
                "Not exact: the loader has %s batches an epoch and had %s when the checkpoint was taken. It "
                "goes on after %d batches, but those to come are not those of a run that was never stopped.",
                self._length,
                position.length,
                position.batches_taken,
            )
        self._check_made_of(position)
        strangers = self._generators.strangers(position.now["own"])
        if strangers:
            log.warning("Not exact: these generators are only in the checkpoint or only here: %s", strangers)

    def _check_made_of(self, position: Position) -> None:
        then, now = position.made_of, self._made_of
        if changed := [name for name in then if name in now and then[name] != now[name]]:
            log.warning(
                "Not exact: the loader is made otherwise than when the checkpoint was taken (%s). It goes on "
                "after %d batches, but those to come are not those of a run that was never stopped.",
                ", ".join(f"{name} is {now[name]} and was {then[name]}" for name in changed),
                position.batches_taken,
            )

    def _capture(self) -> dict[str, Any]:
        return {"global": rng.capture(), "own": self._generators.capture()}

    def _restore(self, marks: Mapping[str, Any]) -> None:
        rng.restore(marks["global"])
        self._generators.restore(marks["own"])

    def _open(self) -> Iterator[Any]:
        """The iterator of a fresh epoch."""
        raise NotImplementedError

    def _reopen(self, position: Position) -> None:
        """Set the iterator so that its next batch is the one after `position`."""
        raise NotImplementedError

    def _unpack(self, item: Any) -> Any:
        return item

    def _leave(self) -> None:
        """The epoch is left, at its end or before."""
        self._iterator = None

    def _ended(self) -> None:
        """The iterator has just raised StopIteration."""
        self._iterator = None

    def _is_last(self) -> bool:
        """Whether it is certain that no batch follows."""
        return False

    def _keeps_workers(self) -> bool:
        """Whether something of an epoch lives on in the next one."""
        return False

    def _load(self, position: Position, *, carried: bool) -> None:
        """Take what `_parts` gave. `carried`: to go on into a later epoch."""

    def _parts(self, over: bool) -> dict[str, Any]:
        return {}
