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

_STATES = {"global": dict, "own": dict}


@dataclass(frozen=True)
class LayoutChange:
    """The change of layout since a position was taken. ranks, world: the old and new number of ranks. alike:
    whether the old ranks' loaders had the same order and state, as far as it is known."""

    ranks: int
    world: int
    alike: bool

    @property
    def is_resized(self) -> bool:
        return self.ranks != self.world


class Position(NamedTuple):
    """A loader's position at a boundary.

    kind: the kind of source that saved it.
    batches_taken: the batches of this epoch.
    over: the epoch has no more batches.
    length: the batches of an epoch; None if unknown.
    made_of: settings such as the batch size, which must not change.
    share: the rank's share; None if unknown.
    moved: the change of layout since then, in a position that was made for another rank.
    at_iter: generator states before the iterator was made; None if nothing was drawn yet or nothing will be
        drawn again.
    at_draw: generator states after the iterator was made, before the first index was drawn. None where
        `at_iter` is None, and for an iterable that is replayed.
    now: generator states at the boundary.
    parts: the further needs of this kind of source.
    ahead: empty, unless batches were drawn and not yet trained on at the boundary. Then the position is the
        one before the first of them, `now` holds the generator states before its draw, and `ahead` holds the
        states before each further draw, also that of the loader's end, and last those at the boundary.
    """

    kind: str
    epoch: int
    batches_taken: int
    over: bool
    length: int | None
    made_of: dict[str, Any]
    share: Share | None
    moved: LayoutChange | None
    at_iter: Any
    at_draw: Any
    now: dict[str, Any]
    parts: dict[str, Any]
    ahead: list[Any]

    def value(self) -> dict[str, Any]:
        """Return plain values, for `read`."""
        return {**self._asdict(), "share": None if self.share is None else self.share.value()}

    @property
    def is_open(self) -> bool:
        """Whether it is in the middle of an epoch, also of one that was divided again and not drawn from."""
        return not self.over and (self.at_iter is not None or self.batches_taken > 0)

    @property
    def is_at_end(self) -> bool:
        """Whether no batch follows, as far as the loader's length is known."""
        return self.over or (self.length is not None and self.batches_taken >= self.length)

    @property
    def boundary(self) -> dict[str, Any]:
        """The generator states at the boundary."""
        states: dict[str, Any] = self.ahead[-1] if self.ahead else self.now
        return states

    @classmethod
    def read(cls, saved: Mapping[str, Any], kind: str, parts: type[Any]) -> Position:
        """Check and return a position. Raises MismatchError for a position of another kind of source,
        DamagedError for a malformed one."""
        saved_kind = saved.get("kind")
        if type(saved_kind) is str and saved_kind != kind:
            raise MismatchError(
                f"The checkpoint was taken with a {saved_kind}, and the loop now has a {kind}. The model and "
                "the rest of the state were already restored; no batch was drawn. Start again with the saved "
                "kind of loader.",
                differences=(("loader", saved_kind, kind),),
            )
        try:
            position = checked_fields(cls, saved)
            position._check(parts)
        except ValueError as error:
            raise DamagedError(
                f"The loader's position in the checkpoint cannot be read ({error}). No batch was drawn. "
                "Resume from an older step."
            ) from error
        return position

    def _check(self, parts: type[Any]) -> None:
        """Raise ValueError if a field is invalid."""
        checked_fields(parts, self.parts)
        if self.batches_taken < (0 if self.share is None else self.share.batches):
            raise ValueError(f"{self.batches_taken} batches, fewer than before its share was divided")
        before = (each for each in (self.at_iter, self.at_draw) if each is not None)
        states = [self.now, *before, *self.ahead]
        for each in states:
            if not isinstance(each, dict) or {k: type(v) for k, v in each.items()} != _STATES:
                raise ValueError("generator states are missing")

    def belongs_to(self, share: Share | None, *, is_global: bool) -> bool:
        """Whether the state in it (generators inside workers, a loader's own state) belongs to the rank with
        this share."""
        if self.share is not None and share is not None:
            return (self.share.ranks, self.share.rank) == (share.ranks, share.rank)
        return self.moved is None or not self.moved.is_resized or is_global

    def continued_by(self, now: Share | None, name: str, *, divides: bool, is_global: bool) -> Share | None:
        """Return the share with which a loader continues in the middle of an epoch: that of the position, or
        its own, or a new one of the rest. Raises MismatchError if samples would be repeated or skipped.

        now: the loader's share of a whole epoch. name: its class. divides: it can continue with any order of
        samples. is_global: its position means the same on each rank, for any number of ranks.
        """
        then, moved = self.share, self.moved
        is_whole = then is None or not then.batches
        is_resized = moved is not None and moved.is_resized
        is_promised = moved is not None and moved.alike and is_global
        if then is None or now is None:
            if is_whole and (is_promised or not is_resized):
                if moved is not None and not is_promised:
                    log.warning(
                        "Not exact if the data are divided in another way than before: the checkpoint has "
                        "another layout of ranks, and %s does not name its part of the data (by num_replicas "
                        "and rank).", name,
                    )  # fmt: skip
                return now
            raise self._refused(now, name)
        is_same, is_alone = then.divides_as(now), then.ranks == now.ranks == 1
        if is_same and (then.order == now.order or not is_whole) or (is_alone and is_whole):
            if is_resized and now.ranks == 1:
                log.warning(
                    "%s does not divide its data among the ranks (it has no DistributedSampler): each rank "
                    "reads all data, and a new rank continues at the batch and in the order of an old rank.",
                    name,
                )
            return now if is_whole else replace(then, whole=now.whole)
        if divides and now.can_follow(then):
            if is_same:
                log.warning(
                    "Not exact: the sampler of %s has another order than when the checkpoint was taken: "
                    "another seed, or another epoch (call set_epoch before the loop over its batches). "
                    "The rest of the saved order is given, with other random numbers.", name,
                )  # fmt: skip
            return now.remaining_after(then, self.batches_taken, self.at_draw)
        if is_whole and not is_resized and (then.ranks, then.rank) == (now.ranks, now.rank):
            return now  # Source._check warns of differences
        raise self._refused(now, name)

    def _refused(self, now: Share | None, name: str) -> MismatchError:
        before = _shown(self.share, None if self.moved is None else self.moved.ranks)
        here = _shown(now, None if self.moved is None else self.moved.world)
        return MismatchError(
            f"The checkpoint was taken after {self.batches_taken} batches of an epoch, with the data "
            f"divided among {before}, and {name} divides them among {here}. The rest cannot be divided "
            "again: samples would be repeated or skipped. The model and all other state were restored; no "
            "batch was drawn. Resume with the former ranks and data, or from a step at an epoch's end "
            "(flashckpt branch). A DataLoader with torch's DistributedSampler, or with Accelerate's, resumes "
            "on any number of ranks; a loader whose position means the same on each rank sets "
            "position_is_global = True.",
            differences=(("loader", before, here),),
        )


def _shown(share: Share | None, world: int | None) -> str:
    if share is None:
        return "an unknown number of ranks" if world is None else f"{world} ranks in an unknown way"
    samples = f" ({share.order.length} samples)" if share.order is not None else ""
    return f"{share.ranks} data-parallel rank{'s' if share.ranks > 1 else ''}{samples}"
