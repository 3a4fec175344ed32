"""The visible steps of a run: which of them a resume tries, in which order, and which one a caller names.

The commits of the newest started attempt are visible; then its parent's, up to the boundary that it resumed
from; and so on (see Catalogue). A quarantine, the record of a failed verification on a host, puts a step last
on that host; it hides and deletes nothing. Going back is a command (`branch`) and no option: a restart would
repeat an option.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from flashckpt.commit import attempts, starting
from flashckpt.commit.attempts import Probe, check_not_held, local_owner, open_run
from flashckpt.commit.catalogue import Catalogue
from flashckpt.commit.choice import Choice, History, Place, RankOffers, choose
from flashckpt.commit.collect import has_lost_records
from flashckpt.commit.steps import (
    StepRecord,
    is_whole,
    missing_files,
    read_record,
    read_step,
)
from flashckpt.errors import DamagedError, FlashckptError, NoSuchStepError, UnusableRunError
from flashckpt.format.names import ATTEMPTS, COMMITS, DATA, AttemptName, CommitName, SnapshotId, start_path
from flashckpt.format.records import Owner, Quarantine
from flashckpt.store.base import Store

_MAX_QUARANTINES = 64
_MAX_HOST_CHARS = 255
_MAX_REASON_CHARS = 2000
_SHOWN = 20
_Found = TypeVar("_Found")


# ---- quarantines


def this_host() -> str:
    """This machine's name in quarantines."""
    return socket.gethostname()[:_MAX_HOST_CHARS]


def quarantine(store: Store, name: CommitName, host: str, reason: str) -> None:
    """Record that the step could not be verified on `host`. A step has at most 64 records."""
    if sum(each == name for each, _ in Catalogue.of(store).quarantines) >= _MAX_QUARANTINES:
        return
    record = Quarantine(name=name, host=host[:_MAX_HOST_CHARS], reason=reason[:_MAX_REASON_CHARS])
    store.create(name.quarantine_path(secrets.token_hex(4)), record.to_bytes())


def quarantines(catalogue: Catalogue, name: CommitName) -> list[Quarantine]:
    """The quarantines of a step that can be read."""
    found: list[Quarantine] = []
    paths = [path for each, path in catalogue.quarantines if each == name]
    for path in paths[:_MAX_QUARANTINES]:
        try:
            found.append(Quarantine.from_bytes(catalogue.store.read(path, Quarantine.MAX_BYTES), path))
        except (DamagedError, FileNotFoundError):
            continue
    return found


def quarantined_here(catalogue: Catalogue, name: CommitName) -> Quarantine | None:
    """The first quarantine of a step by this machine, or None."""
    return next((each for each in quarantines(catalogue, name) if each.host == this_host()), None)


# ---- what a resume tries


def steps(store: Store) -> list[int]:
    """The numbers of the visible steps, newest last, each once. Opens the run; reads no part.

    UnusableRunError if records of attempts are lost: a resume would see other steps.
    """
    open_run(store, create=False)
    catalogue = Catalogue.of(store)
    check_records(store, catalogue)
    return sorted({each.step for each in catalogue.visible()})


def history(store: Store, broken: Mapping[SnapshotId, str] | None = None) -> History:
    """The `History` of a store, from listings and quarantines alone."""
    catalogue, problem = Catalogue.of(store), ""
    try:
        check_records(store, catalogue)
    except UnusableRunError as error:
        problem = str(error)
    marked = [each for each in catalogue.visible() if each in catalogue.quarantined]
    return History(
        url=store.url,
        lineage=catalogue.lineage,
        known=frozenset(each for each in catalogue.attempts if attempts.has_started(catalogue.store, each)),
        commits={each.id: each.step for each in catalogue.commits},
        broken=broken or {},
        quarantined={e.id: frozenset(q.host for q in quarantines(catalogue, e)) for e in marked},
        problem=problem,
    )


def next_start(
    store: Store,
    rows: Sequence[RankOffers] | None = None,
    mirror: Store | None = None,
    *,
    mirror_problem: str = "",
    is_saved: bool = True,
    read_from: Callable[[], str] = str,
    damaged: Collection[SnapshotId] = (),
) -> Choice:
    """Choose what a start of the ranks that offer `rows` resumes from (None: one rank on this host with
    nothing in memory). A store from which some rank reads the first candidate has all files of it.
    `mirror_problem`: why the mirror did not answer. `read_from`: as of History; called only if the snapshot
    that the newest attempt began from is not in the store. `damaged`: commits of the store that cannot be
    used. OSError if a store does not answer."""
    rows = [RankOffers(0, this_host())] if rows is None else rows
    broken: tuple[dict[SnapshotId, str], dict[SnapshotId, str]] = dict.fromkeys(damaged, "it is damaged"), {}
    while True:
        home = history(store, broken[0])
        if len(home.lineage) > 1 and not home.has(home.lineage[1]):
            home = replace(home, read_from=read_from())
        there = None if mirror is None else History(url=mirror.url, problem=mirror_problem)
        if mirror is not None and not mirror_problem:
            there = history(mirror, broken[1])
        choice = choose(rows, home, there, is_saved=is_saved)
        tiers = (Place.HOME, store, broken[0]), (Place.MIRROR, mirror, broken[1])
        found = False
        for each in choice.candidates[:1]:
            for place, of, known in tiers:
                is_read = place in first_places(choice, rows)
                if of is not None and is_read and (why := problem_of(of, each.name)) != "":
                    known[each.id], found = why or "it was deleted", True
        if not found:
            break
    if not choice.candidates and choice.refusal is None and has_lost_records(store, Catalogue.of(store)):
        return replace(choice, refusal=_lost_commits(store))
    return choice


def _lost_commits(store: Store) -> UnusableRunError:
    return UnusableRunError(
        f"{store.url} has lost its commit records: {COMMITS}/ holds none, and {DATA}/ has shards that no "
        "crash leaves so. Nothing was deleted, and no fresh run was started. Restore the files of "
        f"{COMMITS}/, {ATTEMPTS}/ and {DATA}/. If they are lost, `flashckpt recover {store.url}` commits the "
        "snapshots that have all their parts. Shards without a part cannot be resumed from, and any "
        "safetensors reader opens them. To train anew, use another path.",
        path=store.url,
    )


def first_places(choice: Choice, rows: Sequence[RankOffers]) -> frozenset[Place]:
    """The places where the ranks first try to read the first candidate."""
    return frozenset(each.places(row, None)[0] for each in choice.candidates[:1] for row in rows)


def problem_of(store: Store, name: CommitName) -> str | None:
    """Why a committed step is not whole: its record is damaged, or files are missing or of another length.
    Empty if it is whole, None if its record is gone."""
    try:
        record = read_record(store, name)
    except DamagedError as error:
        return str(error)
    if record is None:
        return None
    if not (missing := missing_files(store, record)):
        return ""
    return f"{', '.join(missing[:_SHOWN])}: missing, or not as long as when it was written"


def incomplete(store: Store) -> list[tuple[CommitName, str]]:
    """Visible steps that are not whole, newest first, each with the reason."""
    catalogue = Catalogue.of(store)
    found = [(each, problem_of(catalogue.store, each)) for each in catalogue.newest_first()]
    return [(each, why) for each, why in found if why]


# ---- which step a caller means


def resolve(store: Store, step: int | None = None, at: AttemptName | SnapshotId | None = None) -> StepRecord:
    """Read a committed step: the one that a resume would take, the visible `step`, or `step` of the attempt
    or snapshot `at`, which need not be visible.

    NoSuchStepError, with a list of the steps, if it is not there; UnusableRunError if records are lost, so
    that the resume's step is unknown.
    """
    return read_whole(store, step, at, read=lambda record: record)


def read_whole(
    store: Store,
    step: int | None = None,
    at: AttemptName | SnapshotId | None = None,
    *,
    read: Callable[[StepRecord], _Found],
) -> _Found:
    """What `read` returns for the step that `resolve` finds. If a job deletes the step meanwhile, the error
    of `read` is dropped, and the step is resolved again."""
    open_run(store, create=False)
    while True:
        name = _chosen(store, step, at)
        try:
            return read(read_step(store, name))
        except (FlashckptError, FileNotFoundError):
            # A living job may have deleted the step.
            if name in Catalogue.of(store).commits:
                raise


def until_stable(store: Store, find: Callable[[], list[_Found]]) -> list[_Found]:
    """What `find` finds among the steps; an empty result only if no commit was made meanwhile: a job may have
    deleted all listed steps and committed newer ones."""
    before: Collection[CommitName] | None = None
    while not (found := find()):
        now = Catalogue.of(store).commits
        if now in ((), before):
            break
        before = now
    return found


def _chosen(store: Store, step: int | None, at: AttemptName | SnapshotId | None) -> CommitName:
    if step is None and at is None:
        choice = next_start(store)
        if choice.refusal is not None:
            raise choice.refusal
        if not choice.candidates:
            raise _no_step(store, "no committed step", None)
        return choice.candidates[0].name

    def find() -> list[CommitName]:
        catalogue = Catalogue.of(store)
        if at is not None:
            of = [each for each in catalogue.commits[::-1] if at in (each.attempt, each.id)]
        else:
            of = catalogue.newest_first()
        wanted = (each for each in of if step in (None, each.step))
        return [name for name in wanted if is_whole(store, name)][:1]

    if found := until_stable(store, find):
        return found[0]
    if at is not None:
        raise _no_step(store, f"no committed step {step} of attempt {at}", step)
    raise _no_step(store, f"no visible committed step {step}", step)


def _no_step(store: Store, what: str, step: int | None) -> NoSuchStepError:
    catalogue = Catalogue.of(store)
    visible = catalogue.newest_first()
    newest = sorted({each.step for each in visible}, reverse=True)
    hidden = [each for each in catalogue.commits[::-1] if each.step not in newest]
    there = ", ".join(map(str, newest[:_SHOWN])) or "none"
    more = f" (and {len(newest) - _SHOWN} older)" if len(newest) > _SHOWN else ""
    others = f" Not visible: {_listed(hidden)}; `flashckpt branch` gets them back." if hidden else ""
    return NoSuchStepError(
        f"{store.url} has {what}. Nothing was changed. Visible steps: {there}{more}.{others}",
        step=step,
        path=store.url,
    )


def _listed(names: Collection[CommitName]) -> str:
    return ", ".join(f"{each.step}@{each.attempt}" for each in list(names)[:_SHOWN])


# ---- lost records


def check_records(store: Store, catalogue: Catalogue | None = None) -> None:
    """UnusableRunError if an older lineage would win because records are lost: an attempt newer than all with
    claim and start.json has left commits or a start.json, or the newest start.json is damaged.

    Attempts before the newest started one are not checked: their records may have been removed.
    """
    lost, hidden = _lost(Catalogue.of(store) if catalogue is None else catalogue)
    if lost:
        # An attempt that started between two listings is found by a later one.
        lost, hidden = _lost(Catalogue.of(store))
    if lost:
        steps = f" ({_listed(hidden)})" if hidden else ""
        raise UnusableRunError(
            f"{store.url} has lost records: attempt {max(lost)} has been trained, and its claim "
            f"{ATTEMPTS}/{max(lost).number:06d}.json or its {start_path(max(lost))} is missing or damaged. "
            "Nothing was changed, and no older step is taken instead. Restore the files, or name a step to "
            f"resume from with `flashckpt branch {store.url} STEP@ATTEMPT`{steps}.",
            path=store.url,
        )


def _lost(catalogue: Catalogue) -> tuple[set[AttemptName], list[CommitName]]:
    """Attempts with lost records, and the commits that are hidden by it."""
    number = catalogue.newest_started.number if catalogue.newest_started is not None else 0
    started = None if catalogue.problem is not None else catalogue.newest_started
    newer = [each for each in catalogue.folders if each.number >= number and each != started]
    suspects = [each for each in catalogue.commits[::-1] if each.attempt.number >= number]
    hidden = [each for each in suspects if each.attempt != started]
    lost = {each for each in newer if catalogue.store.exists(start_path(each))}
    return lost | {each.attempt for each in hidden}, hidden


def branch(
    store: Store,
    step: int,
    at: AttemptName | SnapshotId | None = None,
    *,
    probe: Probe | None = None,
    me: Owner | None = None,
    watch_s: float | None = None,
) -> AttemptName:
    """Claim and start an attempt at a visible step, or at `step` of the attempt or snapshot `at`. Later
    starts resume from there. Returns the new attempt.

    Raises, and changes nothing: RunHeldError if a job holds the run, NoSuchStepError if the step is not
    committed, DamagedError.
    """
    open_run(store, create=False)
    owner = me if me is not None else local_owner()
    name = resolve(store, step, at).name
    return starting.branch(store, name, owner, lambda: check_not_held(store, owner, probe, watch_s=watch_s))
