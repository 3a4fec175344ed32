"""`attach`: from a folder and the live state to a Checkpointer. Owns the order of what happens once.

What cannot be saved is refused before the run's folder is touched. Then the claim, the keeper, the choice
of a step; the live state changes only once a snapshot is verified and fits; start.json comes last, so that
an attempt that could not load is as if it had never been. Several ranks do each of these together: where one
cannot, none goes on.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import torch

from flashckpt import _native, crashpoints
from flashckpt.capture import Capture
from flashckpt.capture.devices import devices_of
from flashckpt.capture.digests import digest_tensors
from flashckpt.capture.division import Sharing
from flashckpt.capture.hooks import Habit
from flashckpt.capture.plan import ConstantsRegion, local
from flashckpt.capture.schedule import Every
from flashckpt.checkpointer.attached_run import Resumed
from flashckpt.checkpointer.attendant import Attendant
from flashckpt.checkpointer.checkpointer import Checkpointer
from flashckpt.checkpointer.folders import open_together
from flashckpt.checkpointer.progress import Content, Progress, Use
from flashckpt.checkpointer.remote import remote_of
from flashckpt.checkpointer.run_log import limits_s
from flashckpt.checkpointer.session import Session, log_differences
from flashckpt.checkpointer.signals import Signals
from flashckpt.commit import attempts, lineage
from flashckpt.commit.steps import StepRecord
from flashckpt.errors import (
    DamagedError,
    FlashckptError,
    FormatError,
    OptionError,
    RunError,
    UnusableRunError,
)
from flashckpt.format.parts import MAX_VALUES_BYTES
from flashckpt.format.replicas import in_words
from flashckpt.keeper.client import SlotGrant
from flashckpt.keeper.protocol import Status
from flashckpt.memory.slot import Sealed, Slot
from flashckpt.options import Environment, Keep, Options, Remote, RemoteCall, check_call
from flashckpt.persist.ledger import Event
from flashckpt.ranks.aborts import group_failure
from flashckpt.ranks.group import join
from flashckpt.ranks.pacing import Cadence, Pacing
from flashckpt.restore.filling import check_fits, fill
from flashckpt.restore.memory_tier import Held
from flashckpt.restore.other_layout import LiveLayout
from flashckpt.restore.snapshot import Snapshot
from flashckpt.restore.step_choice import Loaded, StepChoice
from flashckpt.restore.step_image import EarlyRead
from flashckpt.state import rng
from flashckpt.state.objects import is_container
from flashckpt.state.tree import Tree
from flashckpt.store import open_store

log = logging.getLogger(__name__)

# How long a keeper is waited for where something newer is in memory than all ranks can read: one whose file
# makes no progress (it may be synced), one that writes nothing, one that has written all but for the parts of
# other nodes.
_WRITING_PATIENCE_S, _SAVING_PATIENCE_S, _OTHERS_PATIENCE_S, _LOOK_S = 120.0, 10.0, 5.0, 0.05
# And one whose storage fails, over and over: as long at least as the tries take.
_FAILING_PATIENCE_S = 60.0
# What each rank may have its own of: its devices, its machine.
_OWN_OPTIONS = {"device_memory", "streams", "notice_file", "threads"}
_SECRET_OPTIONS = ("storage_options", "remote_storage_options")


def attach(
    path: str | os.PathLike[str],
    *,
    every: Every,
    persist_every: str | int | None,
    keep: Keep,
    remote: RemoteCall,
    options: Options,
    state: Mapping[str, object] | None,
    named: Mapping[str, object],
    check_loop: Callable[[], Mapping[str, str]] = dict,
    early: EarlyRead | None = None,
    integration: str = "",
    restores: bool = True,
) -> Checkpointer:
    """`flashckpt.attach`, switched on: its words and errors stand in attach.py, which closes `early`.
    `check_loop` raises what is wrong with the loop, and gives what ranks must have alike of it."""
    began = time.perf_counter()
    environment = Environment.read()
    group = join(environment)
    try:

        def prepared() -> tuple[Tree, str, Remote | None, Mapping[str, str]]:
            looped = check_loop()
            check_call(every, persist_every, keep, options, remote)
            url = open_store(path).url
            # One part holds the values of all ranks of a node.
            tree = Tree(_state_of(state, named), MAX_VALUES_BYTES // max(1, environment.local_world))
            return tree, url, remote_of(remote, url, keep, options), looped

        tree, url, second, looped = group.together("the state and the options", prepared)
        group.check_alike({**_alike(url, tree, every, persist_every, keep, second, options), **looped})
        group.check_replicas(partial(_replicas, tree))
        session = open_together(path, keep, options, group, second)
    except BaseException:
        group.close()
        raise
    return attach_to(
        session, tree, options, every, persist_every, began=began, early=early, integration=integration,
        restores=restores,
    )  # fmt: skip


def attach_to(
    session: Session,
    tree: Tree,
    options: Options,
    every: Every,
    persist_every: str | int | None,
    *,
    began: float,
    early: EarlyRead | None = None,
    integration: str = "",
    restores: bool = True,
) -> Checkpointer:
    """Restore the newest step that the session's group agrees to and start all that runs beside the loop.
    `began`: when the resume did, by `time.perf_counter`; `early`: what may have been read of it since.
    `integration`: the trainer whose loop it is. Not `restores`: steps are added after the newest one, and
    nothing is read. The Checkpointer closes the session; it is closed here when this raises."""
    progress, group = Progress(integration), session.group
    made: list[Checkpointer] = []
    try:
        if restores:
            taken = _resume(session, tree, progress, options, began, early)
        else:
            taken = _continue_after(session, tree, progress)

        def make() -> None:
            made.append(_checkpointer(session, tree, progress, options, every, persist_every, taken))

        group.together("what runs beside the loop", make)
        group.attached()
    except BaseException:
        if made:
            made[0]._release()
        session.close()
        raise
    return made[0]


def _alike(
    url: str,
    tree: Tree,
    every: Every,
    persist_every: str | int | None,
    keep: Keep,
    remote: Remote | None,
    options: Options,
) -> dict[str, str]:
    """What all ranks must call with, by names for a message."""
    own = {
        each.name: getattr(options, each.name) for each in fields(options) if each.name not in _OWN_OPTIONS
    }
    for name in _SECRET_OPTIONS:
        own[name] = _Hidden(own[name])
    call = {"path": url, "every": every, "persist_every": persist_every, "keep": keep, "remote": remote}
    said = {name: repr(value) for name, value in call.items()}
    said |= {f"Options({name})": repr(value) for name, value in own.items()}
    return said | {"names of the state": ", ".join(tree.names)}


class _Hidden:
    """Options with secrets in them: they can be compared by what is shown, and are not."""

    def __init__(self, options: Mapping[str, Any] | None) -> None:
        self._options = dict(options or {})

    def __repr__(self) -> str:
        if not self._options:
            return "none"
        digest = hashlib.sha256(repr(sorted(self._options.items())).encode()).hexdigest()
        return f"{', '.join(sorted(self._options))} (values not shown, {digest[:8]})"


def _replicas(tree: Tree) -> dict[tuple[int, ...], dict[str, str]]:
    """Of each set of ranks that hold leaves alike by declaration, or parts of them, these, in words."""
    found: dict[tuple[int, ...], dict[str, str]] = {}
    for leaf in tree.found().leaves:
        dtype = str(leaf.tensor.dtype).removeprefix("torch.")
        if leaf.whole is not None:
            found.setdefault(leaf.whole.ranks, {})[leaf.name] = f"{dtype} {leaf.whole.words}"
        elif leaf.replicas:
            found.setdefault(leaf.replicas, {})[leaf.name] = f"{dtype} {list(leaf.tensor.shape)}"
    return found


def _nothing() -> None:
    """What a rank does while others have something to do."""


def _state_of(state: Mapping[str, object] | None, named: Mapping[str, object]) -> dict[str, object]:
    """The state under its names. Raises OptionError for a keyword that is neither option nor state."""
    for name, value in named.items():
        if name in _SECRET_OPTIONS:
            raise OptionError(
                f"{name} is no part of the state: a dictionary of that name would be written into each "
                "checkpoint, with the keys in it. Nothing was started. Give it as "
                f"options=flashckpt.Options({name}=…)."
            )
        stateful = hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
        if not stateful and not is_container(value):
            raise OptionError(
                f"{name}={type(value).__name__}: neither an option of this call nor something with "
                "state_dict and load_state_dict, or a dict or list that the program changes in place. "
                "Nothing was started. Correct the keyword's name, or keep plain values in a dict, as in "
                f'own={{"{name}": …}}, and read and change them there.'
            )
    if state is not None and not isinstance(state, Mapping):
        raise OptionError(
            f"state={type(state).__name__}: a dictionary from names to parts of the state, as in "
            'state={"model": model}. Nothing was started.'
        )
    twice = sorted(set(state or {}) & set(named))
    if twice:
        raise OptionError(
            f"{', '.join(twice)}: named twice, in state= and as a keyword. Nothing was started."
        )
    return {**(state or {}), **named}


@dataclass(frozen=True)
class _Taken:
    """What a resume hands on: the digests of all leaves, by name, which of them were constants, the region
    that holds those, and what was known of each optimizer's gradients."""

    resumed: Resumed | None = None
    known: Mapping[str, int] = field(default_factory=dict)
    constants: frozenset[str] = frozenset()
    region: ConstantsRegion | None = None
    habits: Mapping[str, Habit] = field(default_factory=dict)


def _resume(
    session: Session,
    tree: Tree,
    progress: Progress,
    options: Options,
    began: float,
    early: EarlyRead | None,
) -> _Taken:
    """Restore the newest usable step and write start.json."""
    threads, rank, group = options.threads or torch.get_num_threads(), session.environment.rank, session.group
    mapped: list[Held] = []
    regions: list[Slot] = []
    refused: list[str] = []
    loaded: Loaded | None = None

    def chosen() -> None:
        nonlocal mapped, regions, refused, loaded
        mapped, regions = _survived(session)
        layout = LiveLayout(tree, rank, session.environment.world)
        fits = partial(_check, tree, progress.integration)
        save = partial(_saved_by_keeper, session)
        is_unsaved = partial(_is_unsaved, session, mapped)
        choice = StepChoice(
            session.store, mapped, rank, fits, threads, group.voter(), early, layout, save, is_unsaved,
            session.remote_run,
        )  # fmt: skip
        refused = choice.refused
        loaded = choice.choose()
        if session.leads:
            _check_reached(session, None if loaded is None else loaded.snapshot.step)

    try:
        group.together("the step to go on from", chosen, loads=True)
        if loaded is None:
            _start(session)
            return _Taken()
        resumed = _take_up(session, tree, progress, loaded, refused, began, threads)
        snapshot = loaded.snapshot
        known, constants = snapshot.digests_by_name, snapshot.constants
        return _Taken(resumed, known, constants, _kept(session, loaded), _habits(snapshot))
    except BaseException:
        if loaded is not None:
            loaded.drop()
        raise
    finally:
        for held in mapped:
            held.close()
        for region in regions:
            region.close()


def _continue_after(session: Session, tree: Tree, progress: Progress) -> _Taken:
    """Write start.json after the newest committed step, which all ranks must find alike and which must have
    parts of the same names. The live state stays."""

    def found() -> StepRecord | None:
        _saved_by_keeper(session)  # what a killed job has sealed comes before what is added
        record = lineage.resolve(session.store) if lineage.steps(session.store) else None
        if session.leads:
            _check_reached(session, None if record is None else record.step)
        if record is not None:
            _check_same_parts(session, tree, record)
        return record

    newest = session.group.together("the step to continue after", found, loads=True)
    session.group.check_alike(
        {"newest step": "none" if newest is None else f"{newest.step} of {newest.attempt}"}
    )
    if newest is None:
        _start(session)
    else:
        progress.step = newest.step
        _start(session, newest.attempt, newest.step, newest.boundary)
    return _Taken()


def _check_same_parts(session: Session, tree: Tree, record: StepRecord) -> None:
    """Raise OptionError for the run of a training: steps that are added would displace its own (`keep`), and
    it could not resume from them."""
    first = record.rank(record.parts.heads[0].ranks[0].rank)
    held = first.values["state"]["entries"].keys()
    if held != tree.entries.keys():
        raise OptionError(
            f"{session.store.url} has steps of {', '.join(sorted(held))}: it is the run of a training, which "
            "could not resume from what is saved here. Nothing was saved. Name another folder."
        )


def _check_reached(session: Session, step: int | None) -> None:
    """RunError where what is gone on from (None: nothing) is older than what the run's remote is known to
    have, and that does not answer or was left out."""
    store = session.store
    begun = attempts.bounds(store.at_once())
    is_back = len(begun) > 1 and (step is None or step < begun[1].last_step)
    if session.remote_run is not None:
        from flashckpt.tiers.nearest import check_reached

        check_reached(store, session.remote_run, step)
    elif is_back:
        from flashckpt.tiers.nearest import left_elsewhere

        if why := left_elsewhere(store, -1 if step is None else step):
            raise UnusableRunError(why, path=store.url)


def _start(session: Session, *begins: Any, from_memory: bool = False) -> None:
    """Who leads writes where the attempt goes on from; then the others see that they went on from there,
    too."""
    for leads in (True, False):
        start = partial(session.start, *begins, from_memory=from_memory)
        session.group.together("where the attempt begins", start if session.leads is leads else _nothing)


def _is_unsaved(session: Session, survived: list[Held]) -> bool:
    """Whether this node's keeper is to save something newer than all that this rank has in memory: it may be
    of ranks that are on other nodes now."""
    if session.environment.world == 1:
        return False
    own = max((held.step for held in survived), default=-1)
    return any(step > own for step in session.keeper.status().waiting)


def _saved_by_keeper(session: Session) -> None:
    """Wait until this node's keeper has saved what it can of what dead trainers left: ranks that are others
    now, or elsewhere, find it in storage. Not for one that makes no progress. RunError where storage fails:
    to go on from an older step would leave a whole one behind."""
    moved_s, before = time.monotonic(), (-1, 0, 0)
    tries = _FailedTries(session)
    while True:
        status = session.keeper.status(awaited=True)
        if not status.waiting:
            return
        now = time.monotonic()
        tries.look(status, now)
        progress = len(status.committed), tries.number, status.progress_bytes
        if tries.are_in_vain:
            progress = len(status.committed), before[1], before[2]
        moved_s, before = (now, progress) if progress != before else (moved_s, before)
        if now - moved_s > _patience_s(status, fails=bool(status.failing) and not tries.are_in_vain):
            persisting = () if status.persisting is None else (status.persisting,)
            if steps := (*status.failing, *persisting):
                _check_none_is_left(session, steps)
            log.warning("steps %s are not all in storage yet, and are waited for no longer", status.waiting)
            return
        time.sleep(_LOOK_S)


def _patience_s(status: Status, *, fails: bool) -> float:
    """For a keeper that makes no progress."""
    if status.persisting is not None:
        return _WRITING_PATIENCE_S
    if fails:
        return _FAILING_PATIENCE_S
    return _SAVING_PATIENCE_S if set(status.waiting) - set(status.for_others) else _OTHERS_PATIENCE_S


class _FailedTries:
    """The tries of a keeper that storage has failed: their `number`, and whether they are in vain. That is
    judged when one has failed: of a large state one that is under way and writes takes its time."""

    def __init__(self, session: Session) -> None:
        self._session, self._since_s = session, math.inf
        self._committed = self.number = 0
        self.are_in_vain = False

    def look(self, status: Status, now_s: float) -> None:
        """RunError where what fails has been tried for long and is newer than all that is in storage."""
        before, self.number = self.number, status.counts.get("failed", 0)
        committed, self._committed = self._committed, len(status.committed)
        if not status.failing or committed != self._committed:
            self._since_s, self.are_in_vain = math.inf, False
        if status.failing:
            self._since_s = min(self._since_s, now_s)
            if self.number != before and now_s - self._since_s > _FAILING_PATIENCE_S:
                _check_none_is_left(self._session, status.failing)
                self.are_in_vain = True


def _check_none_is_left(session: Session, steps: Sequence[int]) -> None:
    """RunError where one of these, which storage does not take, is newer than all that is there."""
    newest, url = -1, session.store.url
    with contextlib.suppress(OSError):
        newest = max((each.step for each in lineage.newest_first(session.store)), default=-1)
    if max(steps) > newest:
        raise RunError(
            f"{url}: step {max(steps)} is whole in this node's memory, the ranks that are here now need "
            "it in storage, and storage does not take it; why is in the keeper's log and in the run's "
            "events/. Nothing was loaded, and the step stays in memory. Start again when storage answers; "
            f"to go on from an older step instead, say so with `flashckpt branch {url} STEP`.",
            path=url,
            step=max(steps),
        )


def _survived(session: Session) -> tuple[list[Held], list[Slot]]:
    """Surviving snapshots, and the regions of constants that they name, all mapped."""
    grants = session.keeper.surviving()
    found = [_mapped(grant) for grant in grants if grant.holds_constants]
    regions = {region.header.nonce: region for region in found if region is not None}
    survived = [_held(session, grant, regions) for grant in grants if not grant.holds_constants]
    return [held for held in survived if held is not None], list(regions.values())


def _kept(session: Session, loaded: Loaded) -> ConstantsRegion | None:
    """The region of constants that was loaded from memory, told to the keeper as this attempt's. None where
    there is none: then one is filled before the first snapshot."""
    region, constants = loaded.held.constants if loaded.held else None, loaded.snapshot.layout.constants
    if region is None or constants is None:
        return None
    try:
        os.close(session.keeper.keep_constants(region.name).descriptor)
    except (FlashckptError, OSError) as error:
        log.info("the constants of before are not used further: %s", error)
        return None
    digests = loaded.snapshot.digests[-len(constants.leaves) :]
    return ConstantsRegion(region.name, region.header.nonce, constants, tuple(digests))


def _check(tree: Tree, integration: str, snapshot: Snapshot) -> None:
    """Whether all of a snapshot can be taken up. Changes nothing; DamagedError, MismatchError."""
    Progress(integration).restore(snapshot.section("progress"))
    _habits(snapshot)
    check_fits(tree, snapshot)
    # Last: of what is read here, only this is put in its place for a moment.
    before = rng.capture()
    try:
        rng.restore(snapshot.section("rng"))
    finally:
        rng.restore(before)


def _habits(snapshot: Snapshot) -> dict[str, Habit]:
    """What was known of each optimizer's gradients, by its name. Raises DamagedError."""
    saved = snapshot.section("gradients") if "gradients" in snapshot.values else {}
    try:
        return {name: Habit(habit) for name, habit in saved.items()}
    except ValueError as error:
        raise DamagedError(
            f"The snapshot of step {snapshot.step} holds an unknown word about gradients ({error}). Nothing "
            "was loaded. Resume from an older step.",
            step=snapshot.step,
        ) from error


def _take_up(
    session: Session,
    tree: Tree,
    progress: Progress,
    loaded: Loaded,
    refused: list[str],
    began: float,
    threads: int,
) -> Resumed:
    snapshot = loaded.snapshot
    crashpoints.point("resume.verified")

    def filled() -> None:
        with contextlib.ExitStack() as closing:
            devices = devices_of(leaf.tensor for leaf in tree.found().leaves)
            for device in devices:
                closing.callback(device.close)
            fill(tree, snapshot, threads, devices)
        progress.restore(snapshot.section("progress"))
        rng.restore(snapshot.section("rng"))

    session.group.together("filling the live state", filled, loads=True)
    crashpoints.point("resume.filled")
    slot = loaded.held.slot.name if loaded.held is not None else None
    _start(session, snapshot.attempt, snapshot.step, snapshot.boundary, from_memory=slot is not None)
    log_differences(snapshot.values.get("environment"), session.surroundings())
    resumed = Resumed(
        step=snapshot.step,
        tier=snapshot.tier,
        attempt=str(snapshot.attempt),
        seconds=time.perf_counter() - began,
    )
    # A warning, or nobody would see it: counters and log files of the program's own begin at zero again.
    log.warning(
        "resumed from step %d (%s, %.2f s): %s, the random numbers and the place in loaders are restored; "
        "other variables of the program are not",
        resumed.step, resumed.tier, resumed.seconds, ", ".join(tree.names),
    )  # fmt: skip
    session.keeper.event(
        {
            "event": Event.RESUME.value,
            "step": resumed.step,
            "tier": resumed.tier,
            "slot": slot,
            "rank": session.environment.rank,
            "from_attempt": resumed.attempt,
            "seconds": round(resumed.seconds, 4),
            "refused": refused[:20],
        }
    )
    return resumed


def _mapped(grant: SlotGrant) -> Slot | None:
    """A surviving region. None, said in the log, for one that cannot be read."""
    try:
        return grant.open()
    except FormatError:
        # A newer version's snapshot is whole: to pass it over would leave it behind for good.
        raise
    except (FlashckptError, OSError) as error:
        log.error("a slot in memory cannot be used and is passed over: %s", error)
        return None


def _held(session: Session, grant: SlotGrant, regions: Mapping[int, Slot]) -> Held | None:
    """A surviving slot with its snapshot, the one of `regions`, by nonce, that this names, and the slots of
    the ranks to which it has left something."""
    slot = _mapped(grant)
    if slot is None:
        return None
    others: Sequence[Slot] = ()
    try:
        sealed = slot.sealed()
        others = _others(session, sealed) if sealed is not None else ()
    except DamagedError as error:
        log.error("the snapshot in slot %s is passed over: %s", slot.name, error)
        sealed = None
    except BaseException:
        slot.close()
        raise
    if sealed is None:
        slot.close()
        return None
    constants = regions.get(sealed.record.constants_nonce)
    return Held(slot, grant.owner, sealed, constants=constants, others={each.rank: each for each in others})


def _others(session: Session, sealed: Sealed) -> Sequence[Slot]:
    """The slots of other ranks, where this snapshot needs them."""
    try:
        if sealed.slot.metadata(sealed).left is None:
            return ()
    except DamagedError:
        return ()  # that is said when it is loaded
    return session.keeper.of_same_boundary(*sealed.content)


def _checkpointer(
    session: Session,
    tree: Tree,
    progress: Progress,
    options: Options,
    every: Every,
    persist_every: str | int | None,
    taken: _Taken,
) -> Checkpointer:
    """Everything that runs beside the loop, started."""
    resumed = taken.resumed
    cadence = Cadence(every=every, persist_every=persist_every, options=options)
    pacing = session.group.begin(session.runtime, session.attempt, cadence)
    with contextlib.ExitStack() as undo:
        undo.callback(pacing.close, closed=False)  # its thread would go on for a run that never began
        capture = _capture(session, tree, options, pacing, taken)
        undo.callback(capture.close)
        loaded_step = resumed.step if resumed is not None and resumed.tier == "memory" else None
        limits, signals = limits_s(every, persist_every), Signals(options)
        attendant = Attendant(session, capture, options, limits, loaded_step, signals, pacing)
        checkpointer = Checkpointer(
            tree=tree,
            progress=progress,
            capture=capture,
            session=session,
            attendant=attendant,
            use=_use(tree, capture, progress, options, resumed),
            signals=signals,
            pacing=pacing,
            resumed=resumed,
        )
        undo.pop_all()
    try:
        # Encoded once now: what typed JSON cannot hold is refused here, not at hour ten.
        checkpointer._boundaries.values()
        folder = {} if session.ranks is None else {"folder_ranks": in_words(session.ranks)}
        remote = {} if session.remote is None else {"remote": session.remote.url}
        attendant.event(Event.ATTACH, step=progress.step, world=session.environment.world, **folder, **remote)
        attendant.start()
    except BaseException:
        checkpointer._release()  # its hooks go now, and not when nobody holds the error any more
        raise
    return checkpointer


def _capture(session: Session, tree: Tree, options: Options, pacing: Pacing, taken: _Taken) -> Capture:
    attempt = session.attempt
    capture = Capture(
        tree,
        None,
        _native.Sealer(),
        options,
        devices_of((leaf.tensor for leaf in tree.walk(_nothing_used_up).leaves), options.streams),
        optimizers=tree.optimizers,
        attempt=(attempt.number, int(attempt.nonce, 16)),
        schedule=pacing.schedule,
        known=taken.known,
        constants=taken.constants,
        region=taken.region,
        # Its declarations decide: alone, no other rank holds a leaf.
        sharing=Sharing(
            session.environment.rank, is_divided=True, within=session.ranks, node=session.group.node
        ),
        group_failure=None if pacing.is_alone else group_failure,
    )
    named = tree.named_optimizers
    capture.hooks.resume({id(named[name]): habit for name, habit in taken.habits.items() if name in named})
    return capture


def _use(tree: Tree, capture: Capture, progress: Progress, options: Options, resumed: Resumed | None) -> Use:
    threads = options.threads or torch.get_num_threads()

    def digests() -> dict[str, Content]:
        leaves = tree.walk(capture.hooks.used_up).leaves
        tensors = [local(leaf.tensor) for leaf in leaves]
        found = digest_tensors(tensors, threads)
        return {
            leaf.name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), digest)
            for leaf, tensor, digest in zip(leaves, tensors, found, strict=True)
        }

    # Where nothing was restored, the live state is not that of the newest step.
    is_other = resumed is None or progress.step == 0
    return Use(tree, capture.hooks, digests, check=options.read_ahead_check, used=is_other)


def _nothing_used_up(parameter: object, gradient: object) -> bool:
    return False
