"""The visible steps of a run: which of them a resume tries, in which order, and which one a caller names.

The checkpoints of the newest attempt are visible; then its parent's, up to the boundary that it resumed
from; and so on (see View). Going back is a command (`branch`) and no option: a restart would repeat an
option.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from flashckpt.catalogue.changes import quarantine as quarantined
from flashckpt.commit.choice import Choice, Place, RankOffers, Stored, choose
from flashckpt.commit.steps import StepRecord, is_whole, read_step, whole_or_why
from flashckpt.commit.view import HOME, View, ask, open_run
from flashckpt.errors import FlashckptError, NoSuchStepError
from flashckpt.format.manifest import Manifest
from flashckpt.format.names import AttemptName, CommitName, SnapshotId
from flashckpt.printable import listed
from flashckpt.store.base import Store

_SHOWN = 20
_HOST_ENDS = ": "
_Found = TypeVar("_Found")


# ---- damaged checkpoints


def this_host() -> str:
    """This machine's name in the catalogue."""
    return socket.gethostname()[:255]


def quarantine(store: Store, name: CommitName, host: str, reason: str) -> None:
    """Record that a checkpoint failed two verifications on `host`. Retention does not count it."""
    view = View.of(store)
    if (checkpoint := view.checkpoint(name.id)) is not None:
        change = partial(quarantined, checkpoint=checkpoint, why=f"{host}{_HOST_ENDS}{reason}")
        ask(store, HOME.update(change, view.catalogue))


def damage(view: View, id: SnapshotId) -> tuple[str, str] | None:
    """The host on which a checkpoint failed verification, and the reason. None if it has not."""
    text = view.damaged.get(id)
    if text is None:
        return None
    host, _, reason = text.partition(_HOST_ENDS)
    return host, reason


# ---- what a resume tries


def steps(store: Store) -> list[int]:
    """The numbers of the visible steps, newest last, each once. Reads no part."""
    return sorted({each.step for each in open_run(store, create=False).visible()})


def next_start(
    home: View,
    rows: Sequence[RankOffers] | None = None,
    remote: Stored | None = None,
    *,
    is_saved: bool = True,
    is_start: bool = True,
    damaged: Collection[SnapshotId] = (),
) -> Choice:
    """Choose what a start of the ranks that offer `rows` resumes from (None: one rank, with nothing in
    memory). A store from which some rank reads the first candidate has all files of it. `home`: a view that
    was read just now. `remote`: the mirror, as the start has found it. `is_start`: as of `choose`. `damaged`:
    checkpoints of the home that cannot be used. OSError if the home does not answer."""
    rows = [RankOffers(0)] if rows is None else rows
    stored = {Place.HOME: Stored(home.catalogue, home.store, dict.fromkeys(damaged, "it is damaged"))}
    if remote is not None:
        if not remote.problem:
            try:
                newest = View.of(remote.store.brief(), remote.catalogue).catalogue
                remote = replace(remote, catalogue=newest)
            except OSError as error:
                remote = replace(remote, problem=str(error.strerror or error))
        stored[Place.MIRROR] = remote
    while True:
        choice = choose(rows, *stored.values(), is_saved=is_saved, is_start=is_start)
        if not choice.candidates:
            return choice
        first, manifests = choice.candidates[0], dict[Place, Manifest]()
        read = {first.places(row)[0] for row in rows}
        at = {Place.HOME: first.home, Place.MIRROR: first.mirror}
        looked_at = [(place, each) for place, each in at.items() if place in read and each is not None]
        for place, checkpoint in looked_at:
            found = whole_or_why(stored[place].store, checkpoint)
            if isinstance(found, str):
                # It may be gone because a living job has committed newer ones.
                newest = View.of(stored[place].store, stored[place].catalogue).catalogue
                broken = {**stored[place].broken, first.id: found}
                stored[place] = replace(stored[place], catalogue=newest, broken=broken)
            else:
                manifests[place] = found
        if len(manifests) == len(looked_at):
            return replace(choice, manifests=manifests)


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
            return read(read_step(store, name).check())
        except (FlashckptError, FileNotFoundError):
            # A living job may have deleted the step.
            if View.of(store).has(name):
                raise


def named(
    view: View, step: int | None, at: AttemptName | SnapshotId | None, *, of_all: bool = False
) -> list[CommitName]:
    """The checkpoints that a caller may mean, newest first: visible ones, or those of the attempt or snapshot
    `at`; with `of_all` also those of other branches."""
    names = view.checkpoints if of_all or at is not None else view.visible()
    return [each for each in names[::-1] if step in (None, each.step) and at in (None, each.attempt, each.id)]


def until_stable(store: Store, find: Callable[[], list[_Found]]) -> list[_Found]:
    """What `find` finds among the steps; an empty result only if no commit was made meanwhile: a job may have
    deleted all listed steps and committed newer ones."""
    before: Collection[CommitName] | None = None
    while not (found := find()):
        now = View.of(store).checkpoints
        if now in ((), before):
            break
        before = now
    return found


def _chosen(store: Store, step: int | None, at: AttemptName | SnapshotId | None) -> CommitName:
    if step is None and at is None:
        choice = next_start(View.of(store), is_start=False)
        if choice.refusal is not None:
            raise choice.refusal
        if not choice.candidates:
            raise _no_step(store, "no committed step")
        return choice.candidates[0].name

    def find() -> list[CommitName]:
        view = View.of(store)
        return [each for each in named(view, step, at) if is_whole(view, each)][:1]

    if found := until_stable(store, find):
        return found[0]
    of_attempt = "" if at is None else f" of attempt {at}"
    raise _no_step(store, f"no {'' if at else 'visible '}committed step {step}{of_attempt}", step)


def _no_step(store: Store, what: str, step: int | None = None) -> NoSuchStepError:
    view = View.of(store)
    newest = sorted({each.step for each in view.visible()}, reverse=True)
    hidden = [each for each in view.checkpoints[::-1] if each.step not in newest]
    there = listed([*map(str, newest)], _SHOWN) or "none"
    others = listed([f"{each.step}@{each.attempt}" for each in hidden], _SHOWN)
    others = others and f" Not visible: {others}; `flashckpt branch` gets them back."
    return NoSuchStepError(
        f"{store.url} has {what}. Nothing was changed. Visible steps: {there}.{others}",
        step=step,
        path=store.url,
    )


# ---- going back


def branch(
    store: Store,
    step: int,
    at: AttemptName | SnapshotId | None = None,
    *,
    check: Callable[[], object] = lambda: None,
) -> AttemptName:
    """Begin an attempt at a visible step, or at `step` of the attempt or snapshot `at`, and end it. Later
    starts resume from there. Returns the new attempt. `check` raises if a job holds the run; it is called
    once the step was found.

    Raises, and changes nothing: NoSuchStepError if the step is not committed, DamagedError.
    """
    name = resolve(store, step, at).name
    check()
    return ask(store, HOME.branch(secrets.token_hex(4), name.id)).attempt
