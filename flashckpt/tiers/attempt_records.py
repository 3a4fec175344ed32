"""The records of attempts, brought to another store of the same run: claims and start.json, as they stand.

Owns whether two stores have one history. A store whose own attempts are others has gone on by itself: nothing
is mixed. No `alive` is brought but that of an attempt that ended: nobody trains there by having been copied.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from flashckpt.commit import attempts, lineage
from flashckpt.errors import DamagedError, RunError
from flashckpt.format.names import AttemptName, alive_path, claim_path, start_path
from flashckpt.format.records import Alive, Claim, Start
from flashckpt.store.base import Store


@dataclass(frozen=True, slots=True)
class AttemptRecords:
    """The two files of an attempt, as they stand in a store. `start` is empty for one that never started."""

    name: AttemptName
    claim: bytes
    start: bytes
    ended: str

    @classmethod
    def of(cls, store: Store, name: AttemptName) -> AttemptRecords | None:
        """None where the claim is gone with its attempt. DamagedError."""
        try:
            attempts.read_claim(store, name)
            claim, start = store.read(claim_path(name.number), Claim.MAX_BYTES), b""
            if attempts.read_start(store, name) is not None:
                start = store.read(start_path(name), Start.MAX_BYTES)
        except FileNotFoundError:
            return None
        alive = attempts.alive(store, name)
        return cls(name, claim, start, "" if alive is None else alive.ended)

    def of_all_ranks(self) -> AttemptRecords:
        """As they stand where all ranks of a job are, whose nodes have folders of their own."""
        found = Start.from_bytes(self.start, start_path(self.name))
        if found.ranks is None:
            return self
        return replace(self, start=replace(found, ranks=None).to_bytes())


def needed(source: Store, step_of: AttemptName) -> list[AttemptRecords]:
    """Those by which a step of `step_of` is seen, oldest first: of its attempt, of the newest that started,
    and of its lineage. DamagedError where those of the newest cannot be read."""
    begun = [bound.attempt for bound in attempts.bounds(source)]
    found = []
    for name in sorted({*begun, step_of}):
        try:
            records = AttemptRecords.of(source, name)
        except DamagedError:
            if name in begun[:1]:
                raise
            continue  # the newest's start.json has its lineage
        if records is not None and records.start:
            found.append(records)
    return found


def check_one_history(
    source: Store, target: Store, records: list[AttemptRecords], may_supersede: Callable[[], None]
) -> None:
    """RunError where the target has attempts of its own that these are not the history of, or would hide the
    steps of. `may_supersede` is asked, and raises, before a living attempt there is followed by a newer."""
    if not records:
        return
    for each in records:
        _check_alike(target, each)
    newest = attempts.newest_claimed(target)
    if newest is None or records[-1].name.number <= newest.number:
        return
    if newest not in {info.name for info in attempts.attempts(source)} | {each.name for each in records}:
        last = {bound.attempt: bound.last_step for bound in attempts.bounds(source)}
        is_foreign = newest not in last and attempts.read_start(target, newest) is not None
        if is_foreign and any(e.step > last.get(e.attempt, -1) for e in lineage.newest_first(target)):
            raise _other_history(target, newest)
    alive = attempts.alive(target, newest)
    if alive is not None and not alive.ended:
        may_supersede()


def bring(target: Store, records: list[AttemptRecords]) -> None:
    """Make them the target's, oldest first. What stands there is left; RunError where it is another's."""
    for each in records:
        if not target.exists(start_path(each.name)) or not target.exists(claim_path(each.name.number)):
            target.create(claim_path(each.name.number), each.claim)
            _check_alike(target, each)
            target.create(start_path(each.name), each.start)
        if each.ended and attempts.alive(target, each.name) is None:
            target.create(alive_path(each.name), Alive(count=0, ended=each.ended).to_bytes())
        _check_alike(target, each)


def _check_alike(target: Store, records: AttemptRecords) -> None:
    for path, data in (
        (claim_path(records.name.number), records.claim),
        (start_path(records.name), records.start),
    ):
        try:
            found = target.read(path, Start.MAX_BYTES)
        except FileNotFoundError:
            continue
        except DamagedError as error:
            raise DamagedError(f"{target.url}: {error}", path=path) from error
        if found != data and not _are_of_one(found, records, path):
            raise _other_history(target, records.name, path)


def _are_of_one(found: bytes, records: AttemptRecords, path: str) -> bool:
    """Whether what stands there is of the very attempt, which went on from the same boundary: each node with
    a folder of its own has made that folder's claim."""
    try:
        if path == claim_path(records.name.number):
            return Claim.from_bytes(found, path).attempt == records.name
        there, here = Start.from_bytes(found, path), Start.from_bytes(records.start, path)
    except DamagedError:
        return False
    fields = ("parent", "step", "boundary", "world", "ranks")
    return all(getattr(there, field) == getattr(here, field) for field in fields)


def _other_history(target: Store, name: AttemptName, path: str = "") -> RunError:
    what = f"{path} is another there" if path else f"the source has no attempt {name}"
    return RunError(
        f"{target.url} has been trained by itself, or holds another node's part of the run: {what}. Nothing "
        "was published there, and what it has is as it was. Copy to a place of its own.",
        path=target.url,
    )
