"""What may go, and in which order it goes: steps and attempts of a run, snapshots in memory (which others let
go). Owns every deletion of a step or an attempt.

Only the newest attempt deletes, and committed steps only after a commit of its own. A tombstone takes the
manifest's place, durably, before a part or a shard goes: whoever commits late finds it and stops. What
cannot be removed keeps nothing else.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import MappingProxyType

from flashckpt import crashpoints
from flashckpt.commit import constants
from flashckpt.commit.attempts import (
    Bound,
    attempt_folders,
    attempts,
    bounds,
    names,
    newest_claimed,
    newest_started,
    read_start,
    steps_begun,
)
from flashckpt.commit.constants_files import is_of_remover
from flashckpt.commit.cut_off import remove_cut_off
from flashckpt.commit.lineage import (
    VisibleStep,
    everything,
    has_manifest,
    in_lineage,
    is_marked,
    newest_first,
)
from flashckpt.commit.no_room import Created, create_or_stand_in, is_full, replace_stand_in
from flashckpt.commit.steps import boundary_of, is_committed, read_manifest
from flashckpt.errors import DamagedError
from flashckpt.format.names import (
    ATTEMPTS,
    EVENTS,
    MANIFEST,
    AttemptName,
    attempt_folder,
    claim_path,
    manifest_path,
    step_attempt_folder,
    step_folder,
)
from flashckpt.format.records import Manifest, Start, Tombstone
from flashckpt.options import Keep
from flashckpt.store.base import Store

log = logging.getLogger(__name__)

ALWAYS_KEPT = 2
_LAST_UNSTARTED = 8
# Of attempts of which nothing else is left, the ledgers of so many stay for people to read. They are counted
# once in so many starts, since on an object store the listing of them is a request.
_LEDGERS_KEPT = 64
_LEDGERS_COUNTED_EVERY = 16
# Objects of keepers' own ledgers, where each keeper writes others.
_KEEPER_OBJECTS_KEPT = 256


@dataclass(frozen=True, slots=True)
class _Lineage:
    """The steps of the lineage, newest first: those that are committed, all that were begun, and those of
    which nothing is left but a tombstone."""

    committed: list[VisibleStep]
    begun: list[VisibleStep]
    buried: list[VisibleStep]


def prune(
    store: Store,
    attempt: AttemptName,
    keep: Keep,
    *,
    claimed: AttemptName | None = None,
    in_hand: Collection[int] | None = None,
    common: Collection[int] = (),
    spared: Callable[[], VisibleStep | None] = lambda: None,
    all_are_past: bool = False,
) -> list[VisibleStep]:
    """Delete the visible steps that `keep` lets go, and debris. Returns the committed ones that went.

    Nothing goes unless `attempt` is the newest that claimed, has started, and has committed a step.
    `claimed`: a newer claim that is known to be dead and never started, which does not count.
    Steps of branches that are not visible stay: `branch` can get them back.

    in_hand: given by a caller who knows that no other process commits steps of this attempt any more: the
    steps that it may itself still commit. Then the attempt's tombstones of all other steps go too: nobody is
    left who would have to find them; and the older of its constants shards that no part names: nobody is left
    who would name them. None where that is not known.

    common: where nodes have folders of their own, the newest boundaries of this attempt that are committed
    in all of them, as far as is known. A resume needs a step that all have: it is one of these, or newer.
    Without one nothing goes.

    spared: asked before each step that goes; the one that it names stays this time (it is being copied).

    all_are_past: given by a caller who knows that whoever commits steps of this attempt has gone on from each
    that is older than the newest committed one, in that order. Then the tombstones of these that stood before
    this call go.

    OSError where something could not be deleted (a step that somebody made read-only): all else is first.
    """
    claimed = claimed or attempt
    # The claims are looked at anew before each step that goes.
    above, look = store.at_once(ATTEMPTS), store.at_once()
    if newest_claimed(above) != claimed or (start := read_start(above, attempt)) is None:
        return []
    lineage = _look(look, bounds(above))
    if not any(each.attempt == attempt for each in lineage.committed):
        return []
    needed = _needed_by_all(look, lineage, start, attempt, common)
    if needed is None:
        return []
    crashpoints.point("prune.begun")
    errors: list[OSError] = []
    buried = dict.fromkeys(lineage.buried, look)
    going = [each for each in _going(look, lineage, keep) if each not in needed]
    is_ours = _bury_all(store, going, look, claimed, buried, errors, spared)
    gone = [each for each in going if each in buried and each in lineage.committed]
    if not is_ours:
        return gone
    newest = max(each.step for each in lineage.committed if each.attempt == attempt)
    if in_hand is not None:
        _remove_tombstones(buried, attempt, newest, in_hand, errors)
        _remove_unnamed(store, attempt, errors, above=above, look=look)
    elif all_are_past:
        _remove_tombstones(dict.fromkeys(lineage.buried, look), attempt, newest, (), errors)
    claims = lambda: newest_claimed(store.at_once()) == attempt  # noqa: E731
    _sweep(store, attempt, errors, may_still=claims, above=above, look=look)
    _remove_empty_steps(look, {newest, *(in_hand or ())}, errors)
    if errors:
        raise errors[0]
    return gone


def _needed_by_all(
    look: Store, lineage: _Lineage, start: Start, attempt: AttemptName, common: Collection[int]
) -> Collection[VisibleStep] | None:
    """Where nodes have folders of their own: what stays for a resume of all. None: nothing may go."""
    if start.ranks is None:
        return ()
    agreed = _agreed(look, lineage, attempt, common)
    if not agreed:
        return None
    # Two, so that there is another where one has rotted; what the attempt began with may be the second.
    least = agreed[min(1, len(agreed) - 1)].step
    return [e for e in lineage.begun if e.step >= least or (len(agreed) == 1 and e.step == start.step)]


def _bury_all(
    store: Store,
    going: Sequence[VisibleStep],
    look: Store,
    claimed: AttemptName,
    buried: dict[VisibleStep, Store],
    errors: list[OSError],
    spared: Callable[[], VisibleStep | None],
) -> bool:
    """Bury these steps but the one that is `spared`, and note in `buried` by which look. False, and no more
    goes, once a newer attempt has claimed the run."""

    def may_still() -> bool:
        return newest_claimed(store.at_once()) == claimed

    for each in going:
        if not may_still():
            return False
        if each == spared():
            continue
        with noted(errors):
            left = store.at_once()
            if bury(left, each.step, each.attempt, may_still, look):
                buried[each] = left
    return True


@contextmanager
def noted(errors: list[OSError]) -> Iterator[None]:
    """Something is removed here: where that fails, the rest comes all the same."""
    try:
        yield
    except OSError as error:
        errors.append(error)


def _agreed(
    store: Store, lineage: _Lineage, attempt: AttemptName, common: Collection[int]
) -> list[VisibleStep]:
    """The committed steps of these boundaries of an attempt, newest first."""
    mine = [each for each in lineage.committed if each.attempt == attempt] if common else []
    return [each for each in mine if boundary_of(store, each.step, each.attempt) in common]


def doomed(store: Store, attempt: AttemptName, keep: Keep) -> list[VisibleStep]:
    """The committed steps that `prune` would delete, oldest first. Deletes nothing."""
    start = read_start(store, attempt)
    if start is None or start.ranks is not None:
        return []
    look = store.at_once()
    lineage = _look(look, bounds(store))
    kept = _kept(look, lineage.committed, keep)
    return [each for each in reversed(lineage.committed) if each.step not in kept]


def bury(
    store: Store,
    step: int,
    attempt: AttemptName,
    may_still: Callable[[], bool] = lambda: True,
    look: Store | None = None,
    *,
    leaves_whole: bool = False,
) -> bool:
    """A tombstone in the manifest's place, then the deletion of all else. False where a manifest
    appeared in a step that had none, or `leaves_whole` says that one with a manifest, damaged or not, stays:
    it is left alone.

    may_still: asked once the tombstone stands. Whoever claims after that finds it; for who has claimed
    before, and may have read the manifest, it comes back: then False, and nothing was deleted. `look` shows
    the manifest that is to go.
    """
    path, stone = manifest_path(step, attempt), Tombstone(step=step, attempt=attempt).to_bytes()
    created, was_damaged = Created.FILE, False
    try:
        found = read_manifest(look or store, step, attempt)
    except DamagedError:
        if leaves_whole:
            return False  # it was committed, and can be repaired
        # It names nothing that could be kept: it goes like a manifest.
        was_damaged = True
        if not _replace_damaged(store, path, stone):
            return False
    else:
        if isinstance(found, Manifest) and leaves_whole:
            return False
        if isinstance(found, Manifest):
            # As it stands: another version may have written it.
            before = (look or store).read(path, Manifest.MAX_BYTES)
            if not _replace_manifest(store, path, before, stone, may_still):
                return False
        elif found is None and not (created := create_or_stand_in(store, path, stone)):
            return False
    crashpoints.point("prune.buried")
    try:
        _remove_beside_tombstone(store, step_attempt_folder(step, attempt))
    finally:
        if created is Created.STAND_IN:
            replace_stand_in(store, path, stone)
    # Who repairs may have seen the same damage, and have taken the tombstone for it.
    return bury(store, step, attempt, may_still) if was_damaged and _is_back(store, step, attempt) else True


def _is_back(store: Store, step: int, attempt: AttemptName) -> bool:
    """Whether a manifest stands again where a tombstone did."""
    with suppress(DamagedError):
        return isinstance(read_manifest(store, step, attempt), Manifest)
    return False


def _remove_beside_tombstone(store: Store, folder: str) -> None:
    """Everything else in a step's folder. OSError once all that can go is gone."""
    entries, errors = store.list(folder), list[OSError]()

    def files() -> Iterator[str]:
        for entry in entries:
            if not entry.is_folder and entry.name != MANIFEST:
                yield f"{folder}/{entry.name}"
                crashpoints.point("prune.removed")

    for entry in entries:
        with noted(errors):
            if entry.is_folder:
                store.remove_tree(f"{folder}/{entry.name}")
    with noted(errors):
        store.remove_files(files())
    if errors:
        raise errors[0]


def _replace_damaged(store: Store, path: str, stone: bytes) -> bool:
    """A tombstone in the place of what is no manifest. False where a manifest came there meanwhile."""
    try:
        store.replace(path, stone)
    except OSError as error:
        if not is_full(error):
            raise
        store.remove(path)
        return bool(create_or_stand_in(store, path, stone))
    return True


def _replace_manifest(
    store: Store, path: str, before: bytes, stone: bytes, may_still: Callable[[], bool]
) -> bool:
    """The tombstone in a manifest's place, at once. False where another came meanwhile, or the manifest is
    back."""
    # So that it can come back where the disk fills up meanwhile. With the name of what a write leaves that
    # was cut off: nobody reads it, and it goes with all else.
    second = f"{path.removesuffix(MANIFEST)}.{MANIFEST}.{secrets.token_hex(8)}.tmp"
    has_second = False
    try:
        has_second = store.copy(path, second)
        store.replace(path, stone)
    except OSError as error:
        store.remove(second)
        if not is_full(error):
            raise
        # Full to the last byte, and this is who makes room: the manifest leaves all that there is. Until the
        # tombstone stands, the step is one with all its parts that was not committed yet.
        has_second = False
        if not may_still():
            return False
        store.remove(path)
        if not create_or_stand_in(store, path, stone):
            return False
    if may_still():
        return True
    try:
        store.replace(path, before)
    except OSError:
        store.remove(path)
        if not (has_second and store.copy(second, path)):
            store.create(path, before)
    store.remove(second)
    return False


def sweep_dead(store: Store) -> list[AttemptName]:
    """For who is about to claim, and has seen that nobody trains: delete what dead attempts left, so that a
    job which dies again and again before it commits leaves no more and more behind. Returns them.

    Those before the newest that started commit nothing any more, and their lineage stands in its start.json.
    What has begun to be written of the one that it went on from stays: that one's keeper may be at it, will
    find that it is too late, and must not find its files gone. Of those that claimed and never started the
    last few stay: one may be slow, and its start.json must find its claim.
    """
    look = store.at_once()
    found, with_steps = attempts(look), {each.attempt for each in everything(look)}
    swept, lineage, errors = list[AttemptName](), bounds(look), list[OSError]()
    if lineage:
        spared = [each.attempt for each in lineage[1:2]]
        swept = _sweep(store, lineage[0].attempt, errors, above=look, look=look, spared=spared)
    unstarted = [each.name for each in found if not each.has_started and each.name not in swept]
    for name in unstarted[:-_LAST_UNSTARTED]:
        if name not in with_steps:
            with noted(errors):
                if remove_attempt(store, name, look=look):
                    swept.append(name)
    _remove_empty_steps(look, (), errors)
    remove_cut_off(store)
    if found and found[-1].name.number % _LEDGERS_COUNTED_EVERY == 0:
        with noted(errors):
            _remove_ledgers(store, {each.name for each in found}.difference(swept))
    if errors:
        log.warning("what dead attempts left could not be removed, and fills the storage: %s", errors[0])
    return swept


def _remove_ledgers(store: Store, present: Collection[AttemptName]) -> None:
    """Remove the oldest ledgers of attempts that the run has no more, which no command reads."""
    gone: dict[AttemptName, list[str]] = {}
    keepers: list[tuple[float, str]] = []
    for entry in store.list(EVENTS):
        owner = entry.name.partition(".")[0]
        name = AttemptName.parse(owner)
        if name is not None and name not in present:
            gone.setdefault(name, []).append(entry.name)
        elif owner == "keeper":
            keepers.append((entry.modified_s, entry.name))
    expired = [file for name in sorted(gone)[:-_LEDGERS_KEPT] for file in gone[name]]
    expired += [file for _, file in sorted(keepers)[:-_KEEPER_OBJECTS_KEPT]]
    store.remove_files(f"{EVENTS}/{file}" for file in expired)


def _sweep(
    store: Store,
    attempt: AttemptName,
    errors: list[OSError],
    *,
    above: Store,
    look: Store,
    spared: Collection[AttemptName] = (),
    may_still: Callable[[], bool] = lambda: True,
) -> list[AttemptName]:
    """Delete what is left of attempts older than this one that have no step left. Returns them. `above` shows
    attempts, `look` steps."""
    with_steps, folders = _attempts_of_steps(look, attempt)
    swept = []
    claimed = set(names(above).values())
    # A keeper that was slow may have made a folder anew that was swept before, claim and all.
    there = claimed.union(folders, attempt_folders(above, ATTEMPTS))
    for name in sorted(there - with_steps):
        if name.number >= attempt.number or (name in spared and name in folders) or not may_still():
            continue
        if all([_clear(store, step, name, errors) for step in folders.get(name, [])]):
            with noted(errors):
                if remove_attempt(store, name, look=look, with_claim=name in claimed):
                    swept.append(name)
    return swept


def remove_attempt(store: Store, name: AttemptName, *, look: Store, with_claim: bool = True) -> bool:
    """Delete the folder of an attempt without steps, and its claim. False where steps of later attempts name
    constants in it: then all of it stays. What somebody puts there meanwhile stays, too, and what another has
    written down that he removes: he may be stopped just before."""
    folder = attempt_folder(name)
    found = store.list(folder)
    files = [each.name for each in found if constants.is_one(each)]
    if files and (constants.are_named(look, name) or not constants.remove(store, name, files)):
        return False
    left = [each for each in found if each.name not in files and not is_of_remover(each)]
    for each in left:
        if each.is_folder:
            store.remove_tree(f"{folder}/{each.name}")
    store.remove_files(f"{folder}/{each.name}" for each in left if not each.is_folder)
    store.remove(folder)
    crashpoints.point("prune.swept")
    # Last: as long as it stands, what a crash left of the attempt is found again. Where copies of a run were
    # put into one folder, the claim of this number may be another attempt's.
    if with_claim:
        store.remove(claim_path(name.number))
    return True


def _look(store: Store, of: Sequence[Bound]) -> _Lineage:
    lineage = _Lineage([], [], [])
    for each in in_lineage(store, of):
        if _is_buried(store, each):
            lineage.buried.append(each)
            continue
        lineage.begun.append(each)
        if is_committed(store, each.step, each.attempt):
            lineage.committed.append(each)
    return lineage


def _is_buried(store: Store, each: VisibleStep) -> bool:
    """Whether the step is a tombstone and nothing else: a crash may have left some of the rest."""
    entries = store.list(step_attempt_folder(each.step, each.attempt))
    if [entry.name for entry in entries] != [MANIFEST]:
        return False
    try:
        return isinstance(read_manifest(store, each.step, each.attempt), Tombstone)
    except DamagedError:
        return False


def _remove_tombstones(
    buried: Mapping[VisibleStep, Store], attempt: AttemptName, newest: int, in_hand: Collection[int],
    errors: list[OSError],
) -> None:  # fmt: skip
    """Else each commit leaves a folder that every later look at the steps goes through. Each comes with the
    look that saw nothing but its tombstone."""
    for each, store in buried.items():
        if each.attempt == attempt and each.step < newest and each.step not in in_hand:
            with noted(errors):
                store.remove_tree(step_attempt_folder(each.step, attempt))


def _remove_unnamed(
    store: Store, attempt: AttemptName, errors: list[OSError], *, above: Store, look: Store
) -> None:
    """Else each set of constants, and each keeper killed while it wrote one, leaves a file until the end."""
    with noted(errors):
        if unnamed := constants.unnamed(above, look, attempt):
            constants.remove(store, attempt, unnamed)


def _going(store: Store, lineage: _Lineage, keep: Keep) -> list[VisibleStep]:
    """What `keep` lets go, oldest first: committed steps, and tries that they have overtaken: below the
    oldest of the newest that are kept no try can become one of them."""
    kept, count = _kept(store, lineage.committed, keep), max(keep.last, ALWAYS_KEPT)
    newest = _newest(lineage.committed, count)
    floor = newest[-1] if len(newest) == count else 0

    def goes(each: VisibleStep) -> bool:
        is_multiple = keep.every_steps is not None and each.step % keep.every_steps == 0
        return each in lineage.committed or (each.step < floor and not is_multiple)

    return [each for each in reversed(lineage.begun) if each.step not in kept and goes(each)]


def _newest(committed: Sequence[VisibleStep], count: int) -> list[int]:
    return sorted({each.step for each in committed}, reverse=True)[:count]


def _kept(store: Store, committed: Sequence[VisibleStep], keep: Keep) -> set[int]:
    """The steps that stay. Counted are committed steps, never tries.

    The step that an attempt started from is the newest visible one until it commits a newer one, so it is
    among those that always stay.
    """
    kept = set(_newest(committed, max(keep.last, ALWAYS_KEPT)))
    if keep.every_steps is not None:
        kept |= {each.step for each in committed if each.step % keep.every_steps == 0}
    # A mark puts a step last, so two steps without one must stay for it to be last of something.
    kept |= set(_newest([each for each in committed if not is_marked(store, each)], ALWAYS_KEPT))
    return kept


def _attempts_of_steps(
    store: Store, attempt: AttemptName
) -> tuple[set[AttemptName], dict[AttemptName, list[int]]]:
    """The attempts that have a manifest left (whole or not), and of all others the step folders."""
    with_steps: set[AttemptName] = set()
    folders: dict[AttemptName, list[int]] = {}
    for each in everything(store):
        if each.attempt == attempt or each.attempt in with_steps:
            continue
        folders.setdefault(each.attempt, []).append(each.step)
        if has_manifest(store, each):
            with_steps.add(each.attempt)
    return with_steps, folders


def _clear(store: Store, step: int, attempt: AttemptName, errors: list[OSError]) -> bool:
    """Bury and remove what an attempt has of a step. False where it was committed after all, or cannot go."""
    with noted(errors):
        if bury(store, step, attempt):
            store.remove_tree(step_attempt_folder(step, attempt))
            return True
    return False


def _remove_empty_steps(store: Store, busy: Collection[int], errors: list[OSError]) -> None:
    """But for those of `busy`, and of all above: something may be put into them."""
    for step in steps_begun(store):
        is_idle = step not in busy and (not busy or step < max(busy))
        if is_idle and not store.list(step_folder(step)):
            with noted(errors):
                store.remove(step_folder(step))


# ---- snapshots in memory


@dataclass(frozen=True, kw_only=True)
class Survivor:
    """A sealed snapshot as a survey sees it. `complete` is what its slot says all ranks of the job have."""

    slot: str
    rank: int
    attempt: AttemptName
    step: int
    boundary: int
    is_committed: bool = False
    complete: tuple[int, int] = (0, 0)


def needed(
    store: Store,
    survivors: Sequence[Survivor],
    common: Mapping[AttemptName, Collection[int]] = MappingProxyType({}),
) -> set[str]:
    """Names of the slots that hold something that is committed nowhere and still counts: the newest step of
    an attempt that all its ranks here hold, as long as no step of its run from there on, and no attempt that
    did not start from it, is committed; and what the newest attempt has started from. That stays, where nodes
    have folders of their own, until all have committed a boundary of the attempt: one of `common`."""
    started = newest_started(store)
    visible = next(iter(newest_first(store)), None)
    start = read_start(store, started) if started is not None else None
    kept = set()
    agreed = common.get(started, ()) if started is not None else ()
    alone = start is not None and start.ranks is not None and not any(agreed)
    for attempt in {each.attempt for each in survivors}:
        mine = [each for each in survivors if each.attempt == attempt]
        # What the newest attempt has started from is its, whatever else is left of the one that made it.
        loaded = [e for e in mine if start is not None and start.took_up(attempt, e.step, e.boundary)]
        for each in [*_newest_whole(mine), *(e for e in loaded if not e.is_committed)]:
            if alone and each in loaded:
                is_kept = True
            elif started is None or attempt == started or each in loaded:
                is_kept = visible is None or visible.step < each.step
            else:
                newest = None if visible is None else (visible.step, visible.attempt)
                is_kept = newest is None or (newest[1] != started and newest != (each.step, attempt))
            if is_kept:
                kept.add(each.slot)
    return kept


def _newest_whole(survivors: Sequence[Survivor]) -> list[Survivor]:
    """Of one attempt, what is to be judged. A boundary that a rank has not sealed can never be whole."""
    left = [each for each in survivors if not each.is_committed]
    ranks = {each.rank for each in survivors}
    if len(ranks) < 2:
        newest = max((each.step for each in left), default=None)
        return [each for each in left if each.step == newest]
    holders: dict[tuple[int, int], set[int]] = {}
    for each in survivors:
        holders.setdefault((each.step, each.boundary), set()).add(each.rank)
    whole = sorted(content for content, those in holders.items() if those == ranks)
    number, boundary = max(each.complete for each in survivors)
    if number != survivors[0].attempt.number or whole and boundary > whole[-1][1]:
        boundary = whole[-1][1] if whole else 0
    # Other nodes may have nothing newer than the complete one.
    stays = {content for content in whole if content[1] >= boundary}
    return [each for each in left if not whole or (each.step, each.boundary) in stays]
