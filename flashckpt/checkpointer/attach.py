"""`attach` and `loop`: what a training script calls. Owns their words, and that a loop which is switched off
imports nothing of what it does not use."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from flashckpt.errors import FlashckptError, OptionError
from flashckpt.options import Environment, Keep, Options, RemoteCall, check_call, is_switched_off

if TYPE_CHECKING:
    from flashckpt.checkpointer.checkpointer import Batches, Checkpointer
    from flashckpt.restore.step_image import EarlyRead

_KEEP, _OPTIONS = Keep(last=3), Options()


def attach(
    path: str | os.PathLike[str],
    *,
    every: int | Literal["auto"] | None = "auto",
    persist_every: str | int | None = "5min",
    keep: Keep = _KEEP,
    remote: str | os.PathLike[str] | None = None,
    remote_every: str | int | None = None,
    remote_keep: Keep | None = None,
    options: Options = _OPTIONS,
    enabled: bool = True,
    state: Mapping[str, object] | None = None,
    **named: object,
) -> Checkpointer:
    """Attach the live state to the run in `path`, and restore it if there is something to restore.

    path: a folder or file:// URL, made if missing. every: "auto" takes a snapshot as often as
    `options.overhead` of the loop's time allows; a number takes one every so many steps; None leaves it
    to `.save()`. persist_every: how often a snapshot goes to storage, a duration ("5min"), a number of
    steps, or None. keep: which committed steps stay (`Keep(last=3)`). remote: a second folder or URL, to
    which the keeper copies committed steps, and for which nothing waits; remote_every: how often, a duration,
    a number of steps, or None for each one, as far as it takes them; remote_keep: which stay there, None for
    the same as `keep`. enabled: False gives loops as they are without this library (so does FLASHCKPT=off in
    the environment): nothing is restored or saved, no file and no process is made, and the same calls work.
    state, named: what is saved, under its name: modules, optimizers, schedulers, scalers, anything with
    state_dict and load_state_dict; and dicts, lists, tensors and random generators, which are changed in
    place.

    Raises OptionError, StateError (a part that cannot be saved exactly, with its path in the state),
    RunHeldError (another job has the run), MismatchError (the checkpoint is of another model; nothing was
    changed), UnusableRunError, OutOfRoomError, FormatError, KeeperError, RunError. Unless the message says
    otherwise (storage or the keeper failed after the state was restored), the live state is as it was.
    """
    called = RemoteCall(path=remote, every=remote_every, keep=remote_keep)
    return _attach(path, every, persist_every, keep, called, options, enabled, state, named, _no_loop)


def attach_for(
    integration: str, path: str | os.PathLike[str], state: Mapping[str, object], **options: Any
) -> Checkpointer:
    """`attach`, for a trainer whose loop is not the program's; the run belongs to this integration."""
    unknown = sorted(options.keys() - _CALL_OPTIONS)
    if unknown:
        raise OptionError(
            f"flashckpt.{integration} has no option {', '.join(unknown)}. Nothing was started. The options "
            f"are {', '.join(sorted(_CALL_OPTIONS))}."
        )
    remote = RemoteCall(
        path=options.get("remote"), every=options.get("remote_every"), keep=options.get("remote_keep")
    )
    return _attach(
        path, options.get("every", "auto"), options.get("persist_every", "5min"), options.get("keep", _KEEP),
        remote, options.get("options", _OPTIONS), options.get("enabled", True), state, {}, _no_loop,
        integration, )  # fmt: skip


_CALL_OPTIONS = {
    "every", "persist_every", "keep", "remote", "remote_every", "remote_keep", "options", "enabled",
}  # fmt: skip


def append(path: str | os.PathLike[str], state: Mapping[str, object]) -> Checkpointer:
    """Attach to add steps: the run's newest step is not restored. Its parts have the same names,
    and may have another form. Each `save()` is committed. Otherwise as `attach`."""
    remote = RemoteCall(path=None, every=None, keep=None)
    return _attach(path, None, None, _KEEP, remote, _OPTIONS, True, state, {}, _no_loop, restores=False)


def loop(
    loader: Iterable[Any],
    path: str | os.PathLike[str],
    *,
    epochs: int | None = None,
    steps: int | None = None,
    every: int | Literal["auto"] | None = "auto",
    persist_every: int | str | None = "5min",
    keep: Keep = _KEEP,
    remote: str | os.PathLike[str] | None = None,
    remote_every: str | int | None = None,
    remote_keep: Keep | None = None,
    options: Options = _OPTIONS,
    enabled: bool = True,
    state: Mapping[str, object] | None = None,
    **named: object,
) -> Batches:
    """Iterate over a loader with checkpoints, from where the run in `path` stands.

        for batch in flashckpt.loop(loader, "runs/gpt", model=model, optimizer=optimizer):
            ...

    epochs: how often the loader is gone through; 1 unless `steps` is given. steps: the step that ends
    the run, the loader being repeated until then; with both, whichever is first. Everything else is as
    in `attach`, with its errors. The iterator has `.completed` (the step: the counter to use for `% k`,
    since counters of one's own restart at zero), `.stop()` and `.checkpointer`.

    The normal end captures the last boundary and waits until it is committed (PersistError if it could
    not be). `break` and exceptions capture nothing; what was sealed before is persisted.
    """
    if epochs is None and steps is None:
        epochs = 1
    check = partial(_check_loop, loader, epochs, steps)
    called = RemoteCall(path=remote, every=remote_every, keep=remote_keep)
    checkpointer = _attach(path, every, persist_every, keep, called, options, enabled, state, named, check)
    return checkpointer._whole_run(loader, epochs, steps)


def _attach(
    path: str | os.PathLike[str],
    every: int | Literal["auto"] | None,
    persist_every: str | int | None,
    keep: Keep,
    remote: RemoteCall,
    options: Options,
    enabled: bool,
    state: Mapping[str, object] | None,
    named: Mapping[str, object],
    check: Callable[[bool], Mapping[str, str]],
    integration: str = "",
    *,
    restores: bool = True,
) -> Checkpointer:
    """`check`, which is told whether all is switched off, raises what is wrong with the loop, and gives what
    ranks must have alike of it. Several ranks are told of an error once they have met, and raise it all."""
    is_off = not enabled or is_switched_off()
    alone = is_off or not _is_one_of_several()
    if alone:
        check(is_off)
        check_call(every, persist_every, keep, options, remote)
    if is_off:
        from flashckpt.checkpointer.disabled import DisabledCheckpointer

        return DisabledCheckpointer(path, by_environment=enabled)  # type: ignore[return-value]
    early = _begin_early(path, options) if isinstance(options, Options) and restores else None
    try:
        from flashckpt.checkpointer import resume

        return resume.attach(
            path,
            every=every,
            persist_every=persist_every,
            keep=keep,
            remote=remote,
            options=options,
            state=state,
            named=named,
            check_loop=dict if alone else partial(check, False),
            early=early,
            integration=integration,
            restores=restores,
        )
    finally:
        if early is not None:
            early.close()


def _is_one_of_several() -> bool:
    """By the launcher's word, or by that of a process group; imports nothing for that."""
    distributed: Any = sys.modules.get("torch.distributed")
    is_there = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return Environment.read().world > 1 or (is_there and distributed.get_world_size() > 1)


def _no_loop(is_off: bool) -> dict[str, str]:
    return {}


def _check_loop(loader: object, epochs: int | None, steps: int | None, is_off: bool) -> dict[str, str]:
    """As `check` of `_attach`. Ranks whose loaders have other numbers of batches would end at other
    boundaries, and wait for each other there."""
    for name, value in (("epochs", epochs), ("steps", steps)):
        if value is not None and (type(value) is not int or value < 0):
            raise OptionError(f"{name}={value!r}: a number of {name}, 0 or more. Nothing was started.")
    if is_off:
        return {}
    from flashckpt.state.loader.base import length_of
    from flashckpt.state.loader.sources import check_loader

    check_loader(loader)
    length = length_of(loader) if epochs is not None else None
    counts = {"epochs": epochs, "steps": steps} | (
        {} if length is None else {"batches of the loader": length}
    )
    return {name: str(count) for name, count in counts.items()}


def _begin_early(path: str | os.PathLike[str], options: Options) -> EarlyRead | None:
    """Of a run that is there, begin what takes as long as the imports that follow: start its keeper, if none
    lives on this node (where no trainer comes after all, it leaves soon), and read the step that a resume
    would take from the store, unless there are snapshots in memory. Changes nothing of the run, and raises
    nothing: whatever is wrong, `attach` says."""
    from flashckpt.commit.attempts import open_run
    from flashckpt.keeper.protocol import ELECTION_LOCK
    from flashckpt.keeper.start import start_early
    from flashckpt.memory.region import is_region_name
    from flashckpt.memory.runtime import RuntimeFolder, base_folder, identity_of, is_alive
    from flashckpt.restore.step_image import EarlyRead
    from flashckpt.store import open_store

    environment = Environment.read()
    if not environment.names_rank:
        return None  # whose part is to be read is not known
    # Of a machine's ranks one starts the keeper that all of them find.
    is_new = "flashckpt.checkpointer.resume" not in sys.modules and environment.local_rank == 0
    in_memory = False
    with suppress(FlashckptError, OSError, RuntimeError):  # the last where there are no more threads
        store = open_store(path, options.storage_options)
        identity = identity_of(open_run(store, create=False).run_id, store.place())
        with suppress(FileNotFoundError):
            runtime = RuntimeFolder.open(base_folder(environment.runtime_folder), identity, create=is_new)
            in_memory = any(map(is_region_name, runtime.names()))
            if is_new and not is_alive(runtime, ELECTION_LOCK):
                start_early(store.url, runtime)
            else:
                runtime.close()
        if not in_memory:
            threads = options.threads or max(
                1, len(os.sched_getaffinity(0)) // max(1, environment.local_world)
            )
            # What others wrote for it the ranks of a node read together, once they have met.
            own_alone = environment.local_world > 1
            return EarlyRead(store, environment.rank, threads, environment.world, own_alone=own_alone)
    return None
