"""`attach` and `loop`, which a training script calls, and the loop that is switched off.

Owns the rule that a switched-off loop imports neither torch nor anything that captures.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from flashckpt.checkpointer.run_state import LoopIterator
from flashckpt.errors import OptionError
from flashckpt.options import Call, Environment, Keep, Options, check_call, is_switched_off
from flashckpt.state.loader.samplers import set_epoch

if TYPE_CHECKING:
    from flashckpt.checkpointer.loops import Batches
    from flashckpt.checkpointer.run import Checkpointer

log = logging.getLogger(__name__)


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
    cache: str | os.PathLike[str] | None = None,
    options: Options = _OPTIONS,
    enabled: bool = True,
    state: Mapping[str, object] | None = None,
    **named: object,
) -> Checkpointer:
    """Attach the live state to the run in `path`, and restore it if there is something to restore.

    path: a folder or URL, made if missing. every: "auto" takes a snapshot as often as `options.overhead` of
    the loop's time allows; a number takes one every so many steps; None leaves it to `.save()`.
    persist_every: how often a snapshot goes to storage, a duration ("5min"), a number of steps, or None.
    keep: which committed steps stay (`Keep(last=3)`). remote: a second folder or URL, to which the keeper
    copies committed steps; nothing waits for it. remote_every: how often, a duration, a number of steps, or
    None for each step that the remote can take; remote_keep: which stay there, None for the same as `keep`.
    cache: a folder on a disk of this node, for a `path` that is slower than the disk: snapshots move from
    memory to it, restarts on the same nodes read it, and the keeper writes them to `path` from there. Each
    node may name its own. enabled: False (or FLASHCKPT=off in the environment) gives loops without this
    library: nothing is restored or saved, no file and no process is made, and the same calls work. state,
    named: what is saved, by name: modules, optimizers, schedulers, scalers, all that has state_dict and
    load_state_dict; and dicts, lists, tensors and random generators, which are changed in place.

    Raises OptionError, StateError (a part that cannot be saved exactly, with its path in the state),
    RunHeldError (another job has the run), MismatchError (the checkpoint is of another model; nothing was
    changed), UnusableRunError, OutOfSpaceError, FormatError, KeeperError, RunError. Unless the message says
    otherwise (storage or the keeper failed after the state was restored), the live state is as it was.
    """
    call = Call(
        path=path, every=every, persist_every=persist_every, keep=keep, remote=remote,
        remote_every=remote_every, remote_keep=remote_keep, cache=cache, options=options,
    )  # fmt: skip
    return _attach(call, enabled, state, named)


def attach_for(
    integration: str, path: str | os.PathLike[str], state: Mapping[str, object], **options: Any
) -> Checkpointer:
    """`attach` for a trainer with its own loop; the run belongs to this integration."""
    enabled = options.pop("enabled", True)
    known = {each.name for each in fields(Call)} - {"path"}
    if unknown := sorted(options.keys() - known):
        raise OptionError(
            f"flashckpt.{integration} has no option {', '.join(unknown)}. Nothing was started. The options "
            f"are {', '.join(sorted({*known, 'enabled'}))}."
        )
    return _attach(Call(path=path, **options), enabled, state, {}, integration=integration)


def append(path: str | os.PathLike[str], state: Mapping[str, object]) -> Checkpointer:
    """Attach to add steps: the newest step is not restored. Its parts have the same names, and may have
    another form. Each `save()` is committed. Otherwise as `attach`."""
    call = Call(path=path, every=None, persist_every=None)
    return _attach(call, True, state, {}, restores=False)


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
    cache: str | os.PathLike[str] | None = None,
    options: Options = _OPTIONS,
    enabled: bool = True,
    state: Mapping[str, object] | None = None,
    **named: object,
) -> Batches:
    """Iterate over a loader with checkpoints, from where the run in `path` was saved.

        for batch in flashckpt.loop(loader, "runs/gpt", model=model, optimizer=optimizer):
            ...

    epochs: the number of passes over the loader; 1 unless `steps` is given. steps: the step that ends the
    run, until which the loader is repeated; with both, the earlier end counts. All else is as in `attach`,
    with its errors. The iterator has `.completed` (the step: the counter to use for `% k`, since counters of
    one's own restart at zero), `.stop()` and `.checkpointer`.

    The normal end captures the last boundary and waits until it is committed (PersistError if it could
    not be). `break` and exceptions capture nothing; what was sealed before is persisted.
    """
    if epochs is None and steps is None:
        epochs = 1
    call = Call(
        path=path, every=every, persist_every=persist_every, keep=keep, remote=remote,
        remote_every=remote_every, remote_keep=remote_keep, cache=cache, options=options,
    )  # fmt: skip
    check = partial(_check_loop, loader, epochs, steps)
    return _attach(call, enabled, state, named, check)._whole_run(loader, epochs, steps)


def _attach(
    call: Call,
    enabled: bool,
    state: Mapping[str, object] | None,
    named: Mapping[str, object],
    check: Callable[[bool], Mapping[str, str]] = lambda is_off: {},
    *,
    integration: str = "",
    restores: bool = True,
) -> Checkpointer:
    """check: called with whether the library is switched off; raises the error of the loop's arguments, and
    returns those that ranks must have alike. Several ranks exchange errors once they have met, and all
    raise."""
    is_off = not enabled or is_switched_off()
    has_group = _is_in_a_group()
    if not (is_off or has_group):
        Environment.read().check_alone()  # first: several such processes would each train the whole run
    alone = is_off or not has_group
    if alone:
        check(is_off)
        check_call(call)
    if is_off:
        return DisabledCheckpointer(call.path, by_environment=enabled)  # type: ignore[return-value]
    from flashckpt.checkpointer import resume
    from flashckpt.checkpointer.unnamed import OWN_LOOPS, variables_of

    is_own = restores and integration in OWN_LOOPS
    return resume.attach(
        call,
        state,
        named,
        check_loop=dict if alone else partial(check, False),
        integration=integration,
        restores=restores,
        variables=variables_of(sys._getframe()) if is_own else {},
    )


def _is_in_a_group() -> bool:
    """Whether there is a process group of several ranks. Imports nothing."""
    distributed: Any = sys.modules.get("torch.distributed")
    is_there = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return bool(is_there and distributed.get_world_size() > 1)


def _check_loop(loader: object, epochs: int | None, steps: int | None, is_off: bool) -> dict[str, str]:
    """The `check` of `_attach`. Ranks whose loaders have different numbers of batches would end at different
    boundaries, and wait for each other there."""
    for name, value in (("epochs", epochs), ("steps", steps)):
        if value is not None and (type(value) is not int or value < 0):
            raise OptionError(f"{name}={value!r}: a number of {name}, 0 or more. Nothing was started.")
    if is_off:
        return {}
    from flashckpt.state.loader.source import length_of
    from flashckpt.state.loader.sources import source_of

    source_of(loader)
    length = length_of(loader) if epochs is not None else None
    counts = {"epochs": epochs, "steps": steps} | (
        {} if length is None else {"batches of the loader": length}
    )
    return {name: str(count) for name, count in counts.items()}


class DisabledCheckpointer:
    """The result of `attach(…, enabled=False)`, with the names of Checkpointer: a loop as it is without this
    library. It counts iterations and ends where it is asked to; it restores, saves and starts nothing, and
    handles no signal. `completed` counts iterations of this process, `resumed` is always None."""

    resumed = None
    completed = 0
    stopping = False
    stop_reason: str | None = None
    _epoch = 0
    _in_iteration = _marked = False

    def __init__(self, path: str | os.PathLike[str], *, by_environment: bool) -> None:
        why = "FLASHCKPT=off" if by_environment else "enabled=False"
        # A warning, so that a job does not find out at its first crash that nothing was saved.
        log.warning("%s: nothing is restored from %s, and nothing is saved", why, os.fspath(path))

    def batches(self, loader: Iterable[Any]) -> DisabledBatches:
        return DisabledBatches(self, loader, 1, None)

    def enumerate(self, loader: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        return enumerate(self.batches(loader))

    def epochs(self, epochs: int) -> Iterator[int]:
        for self._epoch in range(epochs):
            before = self.completed
            yield self._epoch
            self.completed += self.completed == before  # as an epoch without batches counts when attached
            if self.stopping:
                return

    def step(self) -> None:
        if not self._marked:
            self._marked = self._in_iteration
            self.completed += 1

    def save(self) -> None:
        """Nothing is saved."""

    def wait(self) -> None:
        """There is nothing to wait for."""

    def stop(self) -> None:
        self.stopping, self.stop_reason = True, "stop"

    def close(self) -> None:
        """There is nothing to let go of."""

    def report(self) -> dict[str, float]:
        return {}

    def __enter__(self) -> DisabledCheckpointer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _whole_run(self, loader: Iterable[Any], epochs: int | None, steps: int | None) -> DisabledBatches:
        return DisabledBatches(self, loader, epochs, steps)

    def _end_of_iteration(self) -> None:
        self.completed += self._in_iteration and not self._marked
        self._in_iteration = self._marked = False


class DisabledBatches(LoopIterator):
    """Batches of a loader, or of a whole run (`epochs`, `steps`), as in a bare loop. Other attributes are the
    loader's."""

    def __init__(
        self, checkpointer: DisabledCheckpointer, loader: Any, epochs: int | None, steps: int | None
    ) -> None:
        self.checkpointer: DisabledCheckpointer = checkpointer
        self._loader, self._epochs, self._steps = loader, epochs, steps
        self._taken = self._passes = 0  # batches of this pass, passes before it
        self._iterator: Iterator[Any] | None = None
        self._ended = False

    def __len__(self) -> int:
        """Batches still to come. TypeError where the loader does not know its length."""
        if self._ended:
            return 0
        left = None if self._steps is None else max(0, self._steps - self.completed)
        if self._epochs is not None:
            length = len(self._loader)
            by_epochs = max(0, (self._epochs - self._passes) * length - self._taken)
            left = by_epochs if left is None else min(left, by_epochs)
        return left or 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __next__(self) -> Any:
        self.checkpointer._end_of_iteration()
        is_done = self._steps is not None and self.completed >= self._steps
        self._ended = self._ended or self.checkpointer.stopping or is_done
        while not self._ended and (self._epochs is None or self._passes < self._epochs):
            if self._iterator is None:
                if self._passes:
                    set_epoch(self._loader, self._passes)
                self._iterator = iter(self._loader)
            for batch in self._iterator:
                self._taken += 1
                self.checkpointer._in_iteration = True
                return batch
            if not self._taken:
                break  # an empty loader that is repeated until `steps` would never end
            self._iterator, self._taken, self._passes = None, 0, self._passes + 1
        self._ended, self._iterator = True, None
        raise StopIteration

    def __del__(self) -> None:
        # Left by `break` or an exception: whether the body was done is unknown.
        if not getattr(self, "_ended", True):
            self.checkpointer._in_iteration = self.checkpointer._marked = False
