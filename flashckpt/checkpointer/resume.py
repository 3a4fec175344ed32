"""`attach`: from a folder and live state to a Checkpointer. Owns the order of what happens once.

State that cannot be saved is refused before the run's folder is touched. Then come the name of
the attempt, the keeper and the choice of a step. The live state changes only once a snapshot fits on all
ranks, and only by verified bytes. The attempt begins last, so that an attempt that could not load leaves no
trace. Ranks do each of these together: if one fails, all raise.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from flashckpt import _native, crashpoints
from flashckpt.capture import Capture
from flashckpt.capture.devices import devices_of, digest_tensors
from flashckpt.capture.hooks import Habit
from flashckpt.capture.plan import ConstantsRegion, Sharing, local
from flashckpt.checkpointer.keeper_link import KeeperLink
from flashckpt.checkpointer.progress import Content, Progress, Use
from flashckpt.checkpointer.run import Checkpointer
from flashckpt.checkpointer.run_log import limits_s
from flashckpt.checkpointer.run_state import Resumed
from flashckpt.checkpointer.session import Session, Start, log_differences, open_together, remote_of
from flashckpt.checkpointer.signals import Signals
from flashckpt.checkpointer.unnamed import Unnamed
from flashckpt.commit.choice import Choice
from flashckpt.commit.lineage import next_start
from flashckpt.commit.steps import StepRecord, read_checkpoint, step_of
from flashckpt.commit.view import View
from flashckpt.errors import DamagedError, FlashckptError, FormatError, OptionError, RunError
from flashckpt.format.names import CommitName, SnapshotId
from flashckpt.format.records import MAX_VALUES_BYTES
from flashckpt.keeper.client import KeeperWait, SlotGrant, WaitTimeouts
from flashckpt.keeper.protocol import Status
from flashckpt.memory.cache_folder import CachePlace
from flashckpt.memory.slot import Sealed, Slot
from flashckpt.options import Call, Environment, Options, Remote, check_call, user_path
from flashckpt.persist.ledger import Event
from flashckpt.ranks.coordination import Alike, Coordination, SnapshotPolicy, Tables, join
from flashckpt.restore.filling import LiveLayout, check_fits, fill
from flashckpt.restore.memory_tier import Held
from flashckpt.restore.poison import Writing
from flashckpt.restore.snapshot import Snapshot
from flashckpt.restore.step_choice import Loaded, StepChoice
from flashckpt.state import rng
from flashckpt.state.objects import is_container
from flashckpt.state.tree import Tree
from flashckpt.store import open_store

log = logging.getLogger(__name__)

# How long a keeper is waited for if a newer step is in memory than all ranks can read. Storage that fails is
# given at least as long as the tries take.
_TIMEOUTS = WaitTimeouts(writing_s=120.0, idle_s=10.0, failing_s=60.0, others_s=5.0)
_POLL_S = 0.05
# Options that may differ among ranks: they are of a rank's devices and machine.
_OWN_OPTIONS = {"device_memory", "streams", "notice_file", "threads", "cache_limit"}
_SECRET_OPTIONS = ("storage_options", "remote_storage_options")
_MOST_REFUSED = 20
_MOST_OPTIONS = 5


def attach(
    call: Call,
    state: Mapping[str, object] | None,
    named: Mapping[str, object],
    *,
    check_loop: Callable[[], Mapping[str, str]] = dict,
    integration: str = "",
    restores: bool = True,
    variables: Mapping[str, object] = MappingProxyType({}),
) -> Checkpointer:
    """`flashckpt.attach`, switched on; attach.py documents it. check_loop: raises the error of the
    loop's arguments, and returns those that ranks must have alike. variables: those that the calling code
    sees, by name."""
    began = time.perf_counter()
    environment = Environment.read()
    group = join(environment)
    try:

        def prepared() -> tuple[tuple[Tree, Remote | None, CachePlace | None], Alike, Tables]:
            looped = check_loop()
            check_call(call)
            url = open_store(call.path, call.options.storage_options).url
            # One part holds the values of all ranks of a node.
            tree = Tree(_state_of(state, named), MAX_VALUES_BYTES // max(1, environment.local_world))
            place = None
            if call.cache is not None:
                place = CachePlace(user_path(call.cache), call.options.cache_limit_bytes)
            remote = remote_of(call, url)
            alike = {**_alike(call, url, tree, remote), "cache": "none" if place is None else "a folder"}
            return (tree, remote, place), {**alike, **looped}, _replicas(tree)

        tree, remote, cache = group.check_alike("the state and the options", prepared)
        session = open_together(call.path, call.keep, call.options, group, remote, cache)
    except BaseException:
        group.close()
        raise
    return attach_to(
        session, tree, call, began=began, integration=integration, restores=restores, variables=variables
    )


def attach_to(
    session: Session,
    tree: Tree,
    call: Call,
    *,
    began: float,
    integration: str = "",
    restores: bool = True,
    variables: Mapping[str, object] = MappingProxyType({}),
) -> Checkpointer:
    """Restore the newest step to which the session's group agrees, and start all that runs beside the loop.

    began: the start of the resume, by `time.perf_counter`. integration: the trainer whose loop it is.
    restores: False adds steps after the newest one, and reads none. The Checkpointer closes the session; this
    closes it if it raises.
    """
    progress, group, writing = Progress(integration), session.group, Writing(tree)
    made: list[Checkpointer] = []
    try:
        if restores:
            found = _resume(session, tree, progress, call.options, began, writing)
        else:
            found = _continue_after(session, tree, progress)

        def make() -> None:
            unnamed = Unnamed(tree, variables, integration=integration, reports=session.environment.rank == 0)
            made.append(_checkpointer(session, tree, progress, call, found, unnamed))
            writing.succeeded()

        group.together("what runs beside the loop", make)
        group.attached()
    except BaseException as error:
        try:
            writing.failed(error)
        finally:
            if made:
                made[0]._release()
            session.close()
        raise
    return made[0]


# ---- the call


def _state_of(state: Mapping[str, object] | None, named: Mapping[str, object]) -> dict[str, object]:
    """Return the state under its names. Raises OptionError for a keyword that is neither option nor state."""
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


def _alike(call: Call, url: str, tree: Tree, remote: Remote | None) -> dict[str, str]:
    """Return what all ranks must call with, by names for a message."""
    shown = {name: repr(getattr(call, name)) for name in ("every", "persist_every", "keep")}
    shown |= {"path": repr(url), "remote": repr(remote)}
    for each in fields(call.options):
        value = getattr(call.options, each.name)
        if each.name in _SECRET_OPTIONS:
            shown[f"Options({each.name})"] = _without_secrets(value)
        elif each.name not in _OWN_OPTIONS:
            shown[f"Options({each.name})"] = repr(value)
    return shown | {"names of the state": ", ".join(tree.names)}


def _without_secrets(options: Mapping[str, Any] | None) -> str:
    """Options that can be compared, and whose values are not shown."""
    if not options:
        return "none"
    digest = hashlib.sha256(repr(sorted(options.items())).encode()).hexdigest()
    return f"{', '.join(sorted(options))} (values not shown, {digest[:8]})"


def _replicas(tree: Tree) -> dict[tuple[int, ...], dict[str, str]]:
    """Return for each set of ranks the leaves that they declare to hold alike, whole or in parts, as name ->
    dtype and shape for a message."""
    found: dict[tuple[int, ...], dict[str, str]] = {}
    for leaf in tree.found().leaves:
        dtype = str(leaf.tensor.dtype).removeprefix("torch.")
        if leaf.whole is not None:
            found.setdefault(leaf.whole.ranks, {})[leaf.name] = f"{dtype} {leaf.whole.words}"
        elif leaf.replicas:
            found.setdefault(leaf.replicas, {})[leaf.name] = f"{dtype} {list(leaf.tensor.shape)}"
    return found


# ---- the resume


@dataclass(frozen=True)
class _Found:
    """The result of a resume. known: leaf name -> digest. constants: the names of the leaves that were
    constants; region: holds them. habits: of each optimizer's gradients, by name."""

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
    writing: Writing,
) -> _Found:
    """Restore the newest usable step and begin the attempt."""
    threads, rank, group = options.threads or torch.get_num_threads(), session.environment.rank, session.group
    survived: list[Held] = []
    regions: list[Slot] = []
    refused: list[str] = []
    loaded: Loaded | None = None
    choice = Choice()

    def targets(snapshot: Snapshot) -> Mapping[str, Tensor]:
        found = tree.targets(snapshot.saved)
        writing.into(snapshot, found)
        return found

    def chosen() -> None:
        nonlocal survived, regions, refused, loaded, choice
        survived, regions = _survived(session)
        layout = LiveLayout(tree, rank, session.environment.world)
        fits = partial(_check, tree, progress.integration)
        save = partial(_saved_by_keeper, session)
        steps = StepChoice(
            session.opened, survived, rank, fits, layout, threads, group.agreement(), save,
            partial(_unsaved, session), session.remote_run, targets,
        )  # fmt: skip
        refused = steps.refused
        loaded = steps.choose()
        choice = steps.choice

    try:
        group.guarded("the step to resume from", chosen)
        if loaded is None:
            session.start(Start(choice=choice))
            return _Found()
        snapshot = loaded.snapshot
        writing.begun = True
        _fill(session, tree, progress, snapshot, threads, writing)
        parent = SnapshotId(snapshot.attempt, snapshot.boundary)
        session.start(Start(parent=parent, step=snapshot.step, tier=snapshot.tier, choice=choice))
        seconds = time.perf_counter() - began
        resumed = Resumed(
            step=snapshot.step, tier=snapshot.tier, attempt=str(snapshot.attempt), seconds=seconds
        )
        _report(session, tree, loaded, resumed, refused)
        return _Found(
            resumed, snapshot.digests, snapshot.constants, _kept(session, loaded), _habits(snapshot)
        )
    except BaseException:
        if loaded is not None:
            loaded.drop()
        raise
    finally:
        for held in survived:
            held.close()
        for region in regions:
            region.close()


def _fill(
    session: Session, tree: Tree, progress: Progress, snapshot: Snapshot, threads: int, writing: Writing
) -> None:
    """Put the snapshot into the live state of all ranks."""
    crashpoints.point("resume.verified")

    def filled() -> None:
        with contextlib.ExitStack() as closing:
            devices = devices_of(leaf.tensor for leaf in tree.found().leaves)
            for device in devices:
                closing.callback(device.close)
            writing.check(snapshot)
            fill(tree, snapshot, threads, devices)
        snapshot.discard()  # before slots are asked for
        progress.restore(snapshot.section("progress"))
        rng.restore(snapshot.section("rng"))

    session.group.together("filling the live state", filled, loads=True)
    crashpoints.point("resume.filled")


def _report(session: Session, tree: Tree, loaded: Loaded, resumed: Resumed, refused: list[str]) -> None:
    """Log the resume, and write it into the ledger."""
    log_differences(loaded.snapshot.values.get("environment"), session.surroundings())
    # A warning, because an info is rarely shown: counters and log files of the program begin at zero again.
    log.warning(
        "resumed from step %d (%s, %.2f s): %s, the random numbers and the place in loaders are restored; "
        "other variables of the program are not",
        resumed.step, resumed.tier, resumed.seconds, ", ".join(tree.names),
    )  # fmt: skip
    _log_replaced(tree)
    session.keeper.event(
        {
            "event": Event.RESUME.value,
            "step": resumed.step,
            "tier": resumed.tier,
            "slot": loaded.held.slot.name if loaded.held is not None else None,
            "rank": session.environment.rank,
            "from_attempt": resumed.attempt,
            "seconds": round(resumed.seconds, 4),
            "refused": refused[:_MOST_REFUSED],
        }
    )


def _log_replaced(tree: Tree) -> None:
    """Log the options of optimizers that the script has changed, and that the checkpoint has replaced."""
    found = tree.replaced_options
    shown = [
        f"{name}: {option} is {saved!r} as in the checkpoint, and not {given!r} as in the script"
        for name, rows in found.items()
        for option, given, saved in sorted(rows, key=lambda row: row[0])
    ]
    if shown:
        log.warning(
            "the checkpoint's options of optimizers count, and not those that the script has changed (%s%s). "
            "To change one, set it in %s.param_groups after attach or loop; a rate also in the base_lrs of "
            "its scheduler",
            "; ".join(shown[:_MOST_OPTIONS]), "; …" if len(shown) > _MOST_OPTIONS else "", next(iter(found)),
        )  # fmt: skip


def _continue_after(session: Session, tree: Tree, progress: Progress) -> _Found:
    """Begin the attempt after the newest committed step, which all ranks must find alike and whose parts must
    have the names of the state. The live state stays."""
    remote, choice = session.remote_run, Choice()

    def found() -> tuple[tuple[StepRecord, str] | None, Alike, Tables]:
        nonlocal choice
        _saved_by_keeper(session)  # a killed job's sealed steps come before the added ones
        choice = next_start(View.of(session.store, session.opened.catalogue), remote=remote)
        if choice.refusal is not None:
            raise choice.refusal
        for first in choice.candidates[:1]:
            store, checkpoint, tier = session.store, first.home, "local"
            if checkpoint is None and remote is not None:
                store, checkpoint, tier = remote.store, first.mirror, "remote"
            assert checkpoint is not None
            record = step_of(store, read_checkpoint(store, checkpoint)).check()
            names = record.rank(record.parts.ranks[0]).values["state"]["entries"].keys()
            if names != tree.entries.keys():  # `keep` would remove the training's own steps
                raise OptionError(
                    f"{session.store.url} has steps of {', '.join(sorted(names))}: it is the run of a "
                    "training, which could not resume from what is saved here. Nothing was saved. Name "
                    "another folder."
                )
            return (record, tier), {"newest step": str(record.name)}, {}
        return None, {"newest step": "none"}, {}

    newest = session.group.check_alike("the step to continue after", found, loads=True)
    start = Start(choice=choice)
    if newest is not None:
        record, tier = newest
        progress.step = record.step
        start = replace(start, parent=record.name.id, step=record.step, tier=tier)
    session.start(start)
    return _Found()


# ---- waiting for the keeper


def _unsaved(session: Session) -> Sequence[CommitName]:
    """Return what this node's keeper still has to save, which may be of ranks that are on other nodes now."""
    has_others = session.environment.world > 1
    return session.keeper.status().unsaved if has_others and session.has_memory else ()


def _saved_by_keeper(session: Session) -> None:
    """Wait until this node's keeper has saved what dead trainers left, as far as it can: ranks that are
    others now, or on other nodes, read it from storage. RunError if storage fails: to resume from an older
    step would abandon a whole one."""
    if not session.has_memory:
        return
    wait = KeeperWait(Status(), _TIMEOUTS)
    while (status := session.keeper.status(awaited=True)).waiting:
        if wait.refusal(status) is not None:
            _check_none_is_newer(session, status.failing)
            wait.count_commits_only()
        if wait.has_stalled(status):
            persisting = () if status.persisting is None else (status.persisting,)
            if steps := (*status.failing, *persisting):
                _check_none_is_newer(session, steps)
            log.warning("steps %s are not all in storage yet, and are waited for no longer", status.waiting)
            return
        time.sleep(_POLL_S)


def _check_none_is_newer(session: Session, steps: Sequence[int]) -> None:
    """Raise RunError if one of these steps, which storage does not take, is newer than all that are there."""
    newest, url = -1, session.store.url
    with contextlib.suppress(OSError):
        newest = max((each.step for each in View.of(session.store).visible()), default=-1)
    if max(steps) > newest:
        raise RunError(
            f"{url}: step {max(steps)} is whole in this node's memory, the ranks that are here now need "
            "it in storage, and storage does not take it; why is in the keeper's log and in the run's "
            "events/. Nothing was loaded, and the step stays in memory. Start again when storage answers; "
            f"to resume from an older step instead, run `flashckpt branch {url} STEP`.",
            path=url,
            step=max(steps),
        )


# ---- snapshots in memory and cache


def _survived(session: Session) -> tuple[list[Held], list[Slot]]:
    """Return the surviving snapshots, and the regions of constants that they name, mapped or open (cache)."""
    grants = session.keeper.surviving() if session.has_memory else []
    opened = [_opened(grant) for grant in grants if grant.holds_constants]
    regions = [region for region in opened if region is not None]
    survived = [_held(session, grant, regions) for grant in grants if not grant.holds_constants]
    return [held for held in survived if held is not None], regions


def _opened(grant: SlotGrant) -> Slot | None:
    """Open a surviving slot or region. Return None, and log it, if it cannot be read."""
    try:
        return grant.open()
    except FormatError:
        # A newer version's snapshot is whole, and would be lost if this one were used.
        raise
    except (FlashckptError, OSError) as error:
        log.error("a slot in memory or cache cannot be used and is passed over: %s", error)
        return None


def _held(session: Session, grant: SlotGrant, regions: Sequence[Slot]) -> Held | None:
    """Return a surviving slot with its snapshot, those of `regions` that it names, and the slots of the ranks
    that hold leaves for it."""
    slot = _opened(grant)
    if slot is None:
        return None
    sealed: Sealed | None = None
    others: Sequence[Slot] = ()
    try:
        try:
            sealed = slot.sealed()
        except DamagedError as error:
            log.error("the snapshot in slot %s is passed over: %s", slot.name, error)
        # Damaged metadata is reported when the snapshot is loaded.
        with contextlib.suppress(DamagedError):
            if sealed is not None and slot.metadata(sealed).image.left.leaves:
                others = session.keeper.of_same_boundary(sealed.id)
    except BaseException:
        slot.close()
        raise
    if sealed is None:
        slot.close()
        return None
    nonce = sealed.record.constants_nonce
    named = [each for each in regions if nonce and each.header.nonce == nonce]
    by_rank: dict[int, list[Slot]] = {}
    for each in _nearest(slot, others):
        by_rank.setdefault(each.rank, []).append(each)
    return Held(slot, grant.owner, sealed, constants=_nearest(slot, named), others=by_rank)


def _nearest(slot: Slot, copies: Sequence[Slot]) -> list[Slot]:
    """Put those first that are where the slot is, in memory or in the cache."""
    return sorted(copies, key=lambda each: each.is_cached is not slot.is_cached)


def _kept(session: Session, loaded: Loaded) -> ConstantsRegion | None:
    """Return the region of constants that was loaded from memory, after the keeper has assigned it to this
    attempt. If None, a region is filled before the first snapshot."""
    region, constants = loaded.held.region if loaded.held else None, loaded.snapshot.region
    if region is None or region.is_cached or constants is None:
        return None
    try:
        os.close(session.keeper.keep_constants(region.name).descriptor)
    except (FlashckptError, OSError) as error:
        log.info("the former region of constants is not used further: %s", error)
        return None
    return ConstantsRegion(region.name, region.header.nonce, *constants)


# ---- what a snapshot holds


def _check(tree: Tree, integration: str, snapshot: Snapshot) -> None:
    """Check that all of a snapshot can be restored. Changes nothing. Raises DamagedError, MismatchError."""
    Progress(integration).restore(snapshot.section("progress"))
    _habits(snapshot)
    check_fits(tree, snapshot)
    # Last, because only this check sets live state for a moment.
    before = rng.capture()
    try:
        rng.restore(snapshot.section("rng"))
    finally:
        rng.restore(before)


def _habits(snapshot: Snapshot) -> dict[str, Habit]:
    """Return the habit of each optimizer's gradients, by its name. Raises DamagedError."""
    saved = snapshot.section("gradients") if "gradients" in snapshot.values else {}
    try:
        return {name: Habit(habit) for name, habit in saved.items()}
    except ValueError as error:
        raise DamagedError(
            f"The snapshot of step {snapshot.step} holds an unknown word about gradients ({error}). Nothing "
            "was loaded. Resume from an older step.",
            step=snapshot.step,
        ) from error


# ---- the Checkpointer


def _checkpointer(
    session: Session,
    tree: Tree,
    progress: Progress,
    call: Call,
    found: _Found,
    unnamed: Unnamed,
) -> Checkpointer:
    """Start all that runs beside the loop."""
    options = call.options
    resumed, loaded = found.resumed, None
    policy = SnapshotPolicy(
        every=call.every,
        persist_every=call.persist_every,
        options=options,
        has_cache=session.cache is not None,
    )
    coordination = session.group.begin(session.runtime, session.attempt, policy)
    with contextlib.ExitStack() as undo:
        undo.callback(unnamed.close)
        undo.callback(coordination.close, closed=False)  # it has a thread
        capture = _capture(session, tree, options, coordination, found)
        undo.callback(capture.close)
        if resumed is not None and resumed.tier in ("memory", "cache") and session.loaded is not None:
            loaded = CommitName(resumed.step, session.loaded.attempt, session.loaded.boundary)
        limits, signals = limits_s(call.every, call.persist_every), Signals(options)
        keeper_link = KeeperLink(session, capture, options, limits, loaded, signals, coordination)
        checkpointer = Checkpointer(
            tree=tree,
            progress=progress,
            capture=capture,
            session=session,
            keeper_link=keeper_link,
            use=_use(tree, capture, progress, options, resumed),
            signals=signals,
            coordination=coordination,
            unnamed=unnamed,
            resumed=resumed,
        )
        undo.pop_all()
    try:
        # Encoded once here, to refuse now what typed JSON cannot hold, and not at the first capture.
        checkpointer._loop.values()
        remote = {} if session.remote is None else {"remote": session.remote.url}
        keeper_link.event(Event.ATTACH, step=progress.step, world=session.environment.world, **remote)
        keeper_link.start()
    except BaseException:
        checkpointer._release()  # the traceback may hold it, and with it its hooks, for long
        raise
    return checkpointer


def _capture(
    session: Session, tree: Tree, options: Options, coordination: Coordination, found: _Found
) -> Capture:
    attempt = session.attempt
    capture = Capture(
        tree,
        None,
        _native.Sealer(),
        options,
        devices_of((leaf.tensor for leaf in tree.walk(_nothing_used_up).leaves), options.streams),
        optimizers=tree.optimizers,
        attempt=(attempt.number, int(attempt.nonce, 16)),
        schedule=coordination.schedule,
        known=found.known,
        constants=found.constants,
        region=found.region,
        # The state's declarations decide: in a world of one, no other rank holds a leaf.
        sharing=Sharing(session.environment.rank, is_divided=True, node=session.group.node),
        group_failure=coordination.group_failure,
    )
    named = tree.named_optimizers
    capture.hooks.resume({id(named[name]): habit for name, habit in found.habits.items() if name in named})
    return capture


def _use(tree: Tree, capture: Capture, progress: Progress, options: Options, resumed: Resumed | None) -> Use:
    threads = options.threads or torch.get_num_threads()

    def digests() -> dict[str, Content]:
        leaves = tree.walk(capture.hooks.used_up).leaves
        tensors = [local(leaf.tensor) for leaf in leaves]
        return {
            leaf.name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), digest)
            for leaf, tensor, digest in zip(leaves, tensors, digest_tensors(tensors, threads), strict=True)
        }

    # If nothing was restored, the live state is not that of the newest step.
    is_other = resumed is None or progress.step == 0
    return Use(tree, capture.hooks, digests, check=options.read_ahead_check, used=is_other)


def _nothing_used_up(parameter: object, gradient: object) -> bool:
    return False
