"""A loader's position in plain values, as it is saved at a boundary, and whether the live loader can continue
from one that was saved."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from flashckpt.errors import DamagedError, MismatchError
from flashckpt.state.loader.order import Share, checked_fields

log = logging.getLogger(__name__)

_EXPLAINED = {
    "dataloader": "a torch DataLoader",
    "stateful": "a loader with its own state",
    "replayed": "an iterable that is replayed",
    "received": "a loader from which the first rank draws for all",
}


@dataclass(frozen=True)
class LayoutChange:
    """The change of layout since a position was taken. ranks, world: the old and new number of ranks. alike:
    whether the old ranks' loaders had the same order and state, as far as it is known."""

    ranks: int
    world: int
    alike: bool

    @classmethod
    def read(cls, saved: Any) -> LayoutChange | None:
        """Return the change with these attributes, or None for None. Raises ValueError for other values."""
        return None if saved is None else checked_fields(cls, saved)

    @property
    def is_resized(self) -> bool:
        return self.ranks != self.world


class Position(NamedTuple):
    """A loader's position at a boundary.

    kind: the kind of source that saved it.
    batches_taken: the batches of this epoch.
    over: the epoch has no more batches.
    length: the batches of an epoch; None if unknown.
    made_of: settings such as the batch size, which must not change; if known, the rank's share ("share") and
        the change of layout ("moved").
    at_iter: generator states before the iterator was made; None if nothing was drawn yet or nothing will be
        drawn again.
    at_draw: generator states after the iterator was made, before the first index was drawn. None where
        `at_iter` is None, and for an iterable that is replayed.
    now: generator states at the boundary.
    parts: the further needs of this kind of source.
    ahead: empty, unless batches were drawn and not yet trained on at the boundary. Then the position is the
        one before the first of them, `now` holds the generator states before its draw, and `ahead` holds the
        states before each further draw, and last those at the boundary.
    has_ended: the loader had returned its last batch at the boundary; it may draw as it ends.
    """

    kind: str
    epoch: int
    batches_taken: int
    over: bool
    length: int | None
    made_of: dict[str, Any]
    at_iter: dict[str, Any] | None
    at_draw: dict[str, Any] | None
    now: dict[str, Any]
    parts: dict[str, Any]
    ahead: list[Any]
    has_ended: bool

    @property
    def is_open(self) -> bool:
        """Whether it is in the middle of an epoch, also of one that was divided again and not drawn from."""
        return not self.over and (self.at_iter is not None or self.batches_taken > 0)

    @property
    def boundary(self) -> dict[str, Any]:
        """The generator states at the boundary."""
        states: dict[str, Any] = self.ahead[-1] if self.ahead else self.now
        return states

    @classmethod
    def read(cls, saved: Mapping[str, Any], kind: str, parts: frozenset[str]) -> Position:
        """Check and return a position. Raises MismatchError for a position of another kind of source,
        DamagedError for a malformed one."""
        saved_kind = saved.get("kind")
        if saved_kind in _EXPLAINED and saved_kind != kind:
            raise MismatchError(
                f"The checkpoint was taken with {_EXPLAINED[saved_kind]}, and the loop now has "
                f"{_EXPLAINED[kind]}. The model and the rest of the state were already restored; no batch "
                "was drawn. Start again with the saved kind of loader.",
                differences=(("loader", saved_kind, kind),),
            )
        try:
            position = checked_fields(cls, saved)
            position._check(kind, parts)
        except ValueError as error:
            raise DamagedError(
                f"The loader's position in the checkpoint cannot be read ({error}). No batch was drawn. "
                "Resume from an older step."
            ) from error
        return position

    def _check(self, kind: str, parts: frozenset[str]) -> None:
        """Raise ValueError if a field is invalid."""
        if self.kind != kind or self.batches_taken < 0 or self.parts.keys() != parts:
            raise ValueError(f"{self.batches_taken} batches of kind {self.kind}, with {sorted(self.parts)}")
        Share.read(self.made_of.get("share"))
        LayoutChange.read(self.made_of.get("moved"))
        before = (each for each in (self.at_iter, self.at_draw) if each is not None)
        states = [self.now, *before, *self.ahead]
        if not all(isinstance(each, dict) and each.keys() == {"global", "own"} for each in states):
            raise ValueError("generator states are missing")


def is_at_end(position: Position) -> bool:
    """Whether no batch follows, as far as the loader's length is known."""
    return position.over or (position.length is not None and position.batches_taken >= position.length)


@dataclass(frozen=True)
class LiveLoader:
    """The facts of a loader that decide whether it can continue from a position.

    name: its class.
    share: its share of a whole epoch.
    divides: it can continue with any order of samples.
    is_global: its position means the same on each rank, for any number of ranks.
    """

    name: str
    share: Share | None
    divides: bool
    is_global: bool

    def keeps(self, position: Position) -> bool:
        """Whether the state in a position (generators inside workers, a loader's own state) belongs to this
        rank."""
        then, moved = _read(position)
        if then is not None and self.share is not None:
            return (then.ranks, then.rank) == (self.share.ranks, self.share.rank)
        return moved is None or not moved.is_resized or self.is_global

    def continue_from(self, position: Position) -> tuple[Share | None, bool]:
        """Return the share with which the loader continues in the middle of an epoch, and whether the rest of
        the epoch is divided again. Raises MismatchError if samples would be repeated or skipped."""
        (then, moved), now = _read(position), self.share
        resized = moved is not None and moved.is_resized
        if then is not None and now is not None:
            if then.divides_as(now) and (then.batches or then.order == now.order):
                return self._as_before(replace(then, whole=now.whole), resized), False
            if then.ranks == now.ranks == 1 and not then.batches:
                return self._as_before(now, resized), False
            if self.divides and _is_one_order(then, now):
                if then.divides_as(now):
                    log.warning(
                        "Not exact: the sampler of %s has another order than when the checkpoint was taken: "
                        "another seed, or another epoch (call set_epoch before the loop over its batches). "
                        "The rest of the saved order is given, with other random numbers.", self.name,
                    )  # fmt: skip
                return now.remaining_after(then, position.batches_taken), True
            if (then.ranks, then.rank) == (now.ranks, now.rank) and not then.batches and not resized:
                return now, False  # Source._check warns of differences
        elif (then is None or not then.batches) and self._may_continue(moved):
            return now, False
        raise self._refused(position, then, moved)

    def _as_before(self, share: Share, resized: bool) -> Share:
        if resized and share.ranks == 1:
            log.warning(
                "%s does not divide its data among the ranks (it has no DistributedSampler): each rank reads "
                "all data, and a new rank continues at the batch and in the order of an old rank.",
                self.name,
            )
        return share

    def _may_continue(self, moved: LayoutChange | None) -> bool:
        """Whether a loader may continue although the ranks' parts of the data are unknown."""
        if moved is None or (self.is_global and moved.alike):
            return True
        if not moved.is_resized:
            log.warning(
                "Not exact if the data are divided in another way than before: the checkpoint has another "
                "layout of ranks, and %s does not name its part of the data (by num_replicas and rank).",
                self.name,
            )
        return not moved.is_resized

    def _refused(self, position: Position, then: Share | None, moved: LayoutChange | None) -> MismatchError:
        before = _shown(then, None if moved is None else moved.ranks)
        here = _shown(self.share, None if moved is None else moved.world)
        return MismatchError(
            f"The checkpoint was taken after {position.batches_taken} batches of an epoch, with the data "
            f"divided among {before}, and {self.name} divides them among {here}. The rest cannot be divided "
            "again: samples would be repeated or skipped. The model and all other state were restored; no "
            "batch was drawn. Resume with the former ranks and data, or from a step at an epoch's end "
            "(flashckpt branch). A DataLoader with torch's DistributedSampler, or with Accelerate's, resumes "
            "on any number of ranks; a loader whose position means the same on each rank sets "
            "position_is_global = True.",
            differences=(("loader", before, here),),
        )


def _read(position: Position) -> tuple[Share | None, LayoutChange | None]:
    made_of = position.made_of
    return Share.read(made_of.get("share")), LayoutChange.read(made_of.get("moved"))


def says_global(loader: object) -> bool:
    """Whether a part of the loader has position_is_global = True."""
    names = ("dataset", "sampler", "batch_sampler")
    parts = (loader, *(getattr(loader, name, None) for name in names))
    return any(getattr(part, "position_is_global", False) is True for part in parts)


def _is_one_order(then: Share, now: Share) -> bool:
    lengths = [s.order.length for s in (then, now) if s.order is not None and s.batch_size is not None]
    return len(lengths) == 2 and lengths[0] == lengths[1]


def _shown(share: Share | None, world: int | None) -> str:
    if share is None:
        return "an unknown number of ranks" if world is None else f"{world} ranks in an unknown way"
    samples = f" ({share.order.length} samples)" if share.order is not None else ""
    return f"{share.ranks} data-parallel rank{'s' if share.ranks > 1 else ''}{samples}"
