"""A run of a trainer that has its own loop. All integrations use this module, and nothing else of the
checkpointer or of loaders.

A trainer draws a batch before it ends an iteration. So draws (`Tap`) and boundaries (`end_iteration`,
`end_epoch`) are separate: at a boundary the integration passes the number of batches that were trained on,
and a resume draws the later ones again, each with its own random numbers. `require` and `check_overridden`
check the framework; `Unsaved` finds attributes that no checkpoint has.

Every method is called from the training thread, in this order: `attach_trainer` once the trainer has built
all that is saved; `tap` in the loader's place; `begin` and `end_iteration` or `end_epoch` around each
iteration; `close` or `abandon`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import itertools
import logging
import os
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from flashckpt.checkpointer.attach import attach_for
from flashckpt.checkpointer.loops import RunCall
from flashckpt.checkpointer.progress import Progress
from flashckpt.checkpointer.run import Checkpointer
from flashckpt.checkpointer.run_state import Resumed
from flashckpt.commit.assets import has_assets, write_assets
from flashckpt.errors import BoundaryError, FlashckptError, OptionError, StateError
from flashckpt.format.typed import encode_json
from flashckpt.options import Options
from flashckpt.state import rng
from flashckpt.state.objects import Deferred as Deferred

if TYPE_CHECKING:
    from flashckpt.checkpointer.session import Session
    from flashckpt.state.loader.source import Source

log = logging.getLogger(__name__)


def attach_trainer(
    path: str | os.PathLike[str],
    state: Mapping[str, object],
    *,
    integration: str,
    on_stop: Callable[[], object],
    assets: Callable[[], Mapping[str, bytes]] | None = None,
    **options: Any,
) -> TrainerRun:
    """Attach a trainer's live state to the run in `path`, and restore it if there is something to restore.

    path, options: as in `flashckpt.attach`, with its errors. state: by name; an object that the trainer
    overwrites later is a `Deferred`. integration: the name of the module flashckpt.*, to which the run
    belongs from then on. on_stop: called at the boundary at which the loop has to end, once that is
    committed; ends the loop in the trainer's way. A signal whose default action ends the process does so
    before. assets: returns files of the run (config, tokenizer) by name; called on rank 0 of a run that has
    none yet, before this returns.
    """
    # Trainers draw ahead, which the check of plain loops would refuse.
    own = options.get("options", Options())
    if isinstance(own, Options):
        options["options"] = replace(own, read_ahead_check=False)
    checkpointer = attach_for(integration, path, state, **options)
    if not isinstance(checkpointer, Checkpointer):
        return DisabledRun(checkpointer)
    if assets is not None:
        _keep_assets(checkpointer._session, assets)
    return TrainerRun(checkpointer, on_stop)


def _keep_assets(session: Session, assets: Callable[[], Mapping[str, bytes]]) -> None:
    """Log a failure and train: an export can take the files from elsewhere."""
    try:
        if session.environment.rank == 0 and not has_assets(session.store):
            write_assets(session.store, assets())
    except Exception as error:  # `assets` is code of the framework: a config that does not validate raises
        log.warning(
            "The config and tokenizer could not be kept in %s: %s. Steps are saved as always; `flashckpt "
            "export --format hf` of this run needs --config.",
            session.store.url,
            error,
        )


class TrainerRun:
    """checkpointer: its public methods may be called at any time. begun: an iteration has begun in this
    process. epoch: the present one, 0 on a fresh run. stopped: `on_stop` was called. is_held: while it is
    set, a new pass over a tap gives no batch, because the trainer has not reached the place where it resumes.
    """

    def __init__(self, checkpointer: Checkpointer, on_stop: Callable[[], object]) -> None:
        self.checkpointer, self._on_stop = checkpointer, on_stop
        self._progress, self._loop = checkpointer._progress, checkpointer._loop
        self._progress.manages_epochs = True
        self.begun = self.stopped = self.is_held = False
        # A tap has drawn a batch; one that the run had not drawn before it was saved.
        self._has_begun_draws = self._drew_new = False
        # The trainer may change these before its loop continues.
        self._due_rng = checkpointer._due_rng
        self._due_gradients = _gradients(checkpointer) if self.resumed else []
        checkpointer._due_rng = None

    @property
    def resumed(self) -> Resumed | None:
        return self.checkpointer.resumed

    @property
    def epoch(self) -> int:
        return self._progress.epoch

    @property
    def trained(self) -> int:
        """The batches of the present epoch, of the first tap, that were trained on when the run was saved; 0
        between two epochs. To be read before the first draw."""
        return next((self._progress.drawn(name) for name in self._progress.taps), 0)

    def tap(self, loader: Any, name: str = "train") -> Tap:
        """Return a tap in the place of `loader`. name: one for each loader that is open at the same time."""
        if is_tap(loader):
            loader = loader.__dict__["_loader"]
        self._progress.taps.setdefault(name, 0)
        return Tap(self, loader, name)

    def begin_at(self, step: int, epoch: int, batches: int) -> None:
        """Begin a run that has no step after `step` steps, with `batches` batches of `epoch` trained on. The
        first pass of the first tap skips those; the caller restores random numbers after it. Raises
        BoundaryError on a run that has a step, or has begun."""
        if self.resumed is not None or self.begun or self.checkpointer.completed:
            raise BoundaryError(
                f"The run is at step {self.checkpointer.completed} already, so it cannot begin at step "
                f"{step} of something else. Nothing was changed. Import into an empty run."
            )
        self._progress.step, self._progress.epoch = step, epoch
        self._progress.to_skip = batches

    def restore_again(self) -> None:
        """Restore the random numbers, and gradients that the trainer has dropped, as they were at the
        boundary. To be called once, where the loop continues, before it draws a new batch; otherwise the
        first draw sets the random numbers. Does nothing on a fresh run, or once an iteration has begun."""
        due, gradients, self._due_rng, self._due_gradients = self._due_rng, self._due_gradients, None, []
        if due is not None and not self._drew_new:
            rng.restore(due)
        for parameter, gradient, version in gradients:
            if gradient._version != version:
                raise StateError(
                    "The trainer has overwritten gradients that were restored, in place, before its loop "
                    "continued. Nothing was captured, and what is saved is whole. Drop gradients with "
                    "zero_grad(set_to_none=True)."
                )
            if parameter.grad is None:
                parameter.grad = gradient

    def _open(self, name: str, loader: Any) -> Source:
        """Begin a pass over a tap's loader."""
        if self._due_rng is not None and not self._has_begun_draws:
            rng.restore(self._due_rng)
        source = self._progress.open_tap(name, loader, in_lockstep=self._has_begun_draws)
        skipped = self._progress.to_skip if name == next(iter(self._progress.taps)) else 0
        if skipped:
            source.skip(skipped)
            self._progress.to_skip = 0
            source.count_trained(skipped)
        return source

    def _draw(self, name: str, source: Source) -> Any:
        """Draw a tap's next batch."""
        is_redraw = source.redraws
        batch = source.next()
        if name not in self._progress.open_sources:
            raise BoundaryError(
                f"The loader {name!r} was asked for a batch by an iterator of an epoch that has ended, so "
                "the batch belongs to no epoch. What was captured is whole. Make an iterator in each epoch."
            )
        self._has_begun_draws = True
        self._drew_new = self._drew_new or not is_redraw
        return batch

    # ---- boundaries

    def begin(self) -> None:
        """Begin an iteration, in which a batch is trained on. Signals are watched from the first one on."""
        if self.stopped:
            return
        with RunCall(self.checkpointer):
            if not self.begun:
                # Not at attach: the trainer installs its own handlers after that.
                self.begun = True
                self.checkpointer._signals.enter()
            self._due_rng = None
            self._due_gradients = []
            self.checkpointer._begin_iteration()

    def end_iteration(
        self, *, trained: int | Mapping[str, int], last: bool = False, provisional: bool = False
    ) -> None:
        """Pass the boundary: all of the iteration is done. trained: the batches of this epoch that were
        trained on, of each tap, or by the taps' names. last: no iteration follows; the step is committed.
        provisional: it is unknown whether a batch follows; the caller draws, and calls `has_drawn`."""
        if self.stopped:
            return
        checkpointer = self.checkpointer
        with RunCall(checkpointer):
            self._progress.count_trained(trained)
            checkpointer._is_provisional = provisional
            checkpointer._end_of_iteration()
            if last:
                self._loop.capture_now(persist=True)
            elif provisional and checkpointer._stops_here():
                # The loop ends here if a batch follows. An error is raised when it ends.
                with contextlib.suppress(FlashckptError):
                    self._loop.capture_now(persist=False)
        if not provisional:
            self._stop_here()

    def has_drawn(self, *, follows: bool) -> None:
        """After a provisional boundary: a batch follows, or the epoch's end is the next boundary."""
        if self.stopped:
            return
        if follows:
            self._stop_here()
        else:
            self._loop.withdraw()
            self._loop.settle()

    def end_epoch(self, *, last: bool = False) -> None:
        """Pass the boundary of an epoch's end, after its own code; it also ends the iteration that has begun.
        last: no epoch follows; the step is committed."""
        if self.stopped:
            return
        checkpointer = self.checkpointer
        with RunCall(self.checkpointer):
            self._progress.count_trained(None)  # batches drawn ahead end with the epoch
            if checkpointer._in_iteration:
                # One snapshot, of the epoch's end, even if a stop arrives in between.
                checkpointer._leave_iteration()
                checkpointer._enter_boundary(checkpointer.completed + 1)
                self._loop.pass_boundary(held=True)
            checkpointer._end_of_epoch(last=last)
        self._stop_here()

    def _stop_here(self) -> None:
        """End the loop if it has to end at this boundary."""
        if not self.checkpointer._stops_here():
            self._loop.settle()
            return
        self.stopped = True
        with RunCall(self.checkpointer):
            self._progress.is_cut = bool(self._progress.open_sources)
            self.checkpointer._end_loop(self._capture_last)
        self._on_stop()

    def _capture_last(self) -> None:
        self._loop.capture_now(persist=True)

    # ---- the end

    def close(self, *, out_of_data: bool = False) -> None:
        """Wait until all that is captured is committed, and release the run, because the trainer has ended in
        order. Raises PersistError if it cannot be committed. out_of_data: the loader ended after an iteration
        had begun, in which nothing was trained on; the boundary before it is captured and committed."""
        checkpointer = self.checkpointer
        checkpointer._capture.heartbeat.rest()
        capture = self._capture_last if out_of_data and self.begun and checkpointer.completed else _nothing
        with RunCall(self.checkpointer):
            if out_of_data:
                checkpointer._abandon_iteration()
            if self.begun and not self.stopped:
                checkpointer._end_loop(lambda: checkpointer._end(capture))
            else:
                checkpointer._end(_nothing)

    def abandon(self) -> None:
        """Release the run without a capture, because an exception has ended the trainer. The keeper persists
        the newest snapshot. Does nothing after `close`."""
        checkpointer = self.checkpointer
        with RunCall(checkpointer), checkpointer._signals.ending() as signals:
            checkpointer._capture.confirm()  # the loader has failed, and not ended
            if self.begun and not self.stopped:
                signals.leave()
            checkpointer._abandon_iteration()
            checkpointer._release(raised=True)


def _gradients(checkpointer: Checkpointer) -> list[tuple[Tensor, Tensor, int]]:
    """Return each parameter that has a gradient, the gradient, and its version."""
    parameters = [p for _, p in checkpointer._tree.parameters()]
    return [(p, p.grad, p.grad._version) for p in parameters if p.grad is not None]


def _nothing() -> None:
    """The capture of an end whose last boundary is committed already."""


class DisabledRun(TrainerRun):
    """A trainer without checkpoints (`enabled=False`, FLASHCKPT=off): a tap is its loader; calls have no
    effect."""

    def __init__(self, checkpointer: Any) -> None:
        self.checkpointer, self.begun = checkpointer, False

    resumed = None
    epoch = trained = 0
    stopped = False

    def tap(self, loader: Any, name: str = "train") -> Any:
        return loader

    def begin_at(self, step: int, epoch: int, batches: int) -> None:
        raise OptionError(
            "A run that is switched off cannot begin at another place: nothing would restore the batches. "
            "Nothing was started. Resume by the trainer's own means."
        )

    def begin(self) -> None:
        self.begun = True

    def _ignore(self, **how: Any) -> None:
        """Nothing is restored, there is no boundary, and nothing is held."""

    restore_again = end_iteration = has_drawn = end_epoch = close = abandon = _ignore


class Tap:
    """Iterated over in the place of a loader, so that each draw is recorded. It draws no batch before its
    first `next`, may be iterated again, and need not be exhausted. Attributes and `isinstance` are the
    loader's.

    name: under which a resume finds its position.
    drawn: batches given in this epoch; if the tap has not drawn since a resume, those that were trained on.
    """

    def __init__(self, run: TrainerRun, loader: Any, name: str) -> None:
        self.__dict__.update(_run=run, _loader=loader, _name=name, _newest=None)

    @property
    def drawn(self) -> int:
        progress: Progress = self.__dict__["_run"]._progress
        return progress.drawn(self.__dict__["_name"])

    @property  # type: ignore[misc]  # typeshed has an attribute that can be set
    def __class__(self) -> Any:
        return self.__dict__["_loader"].__class__

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_loader" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["_loader"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_loader"], name, value)

    def __len__(self) -> int:
        return len(self.__dict__["_loader"])

    def __iter__(self) -> Iterator[Any]:
        if self.__dict__["_run"].is_held:
            return iter(())
        newest = self.__dict__["_newest"] = _Pass(self)
        return newest


class _Pass(Iterator[Any]):
    """One pass of a tap over its loader."""

    def __init__(self, tap: Tap) -> None:
        self._tap = tap
        self._source: Source | None = None
        self._ended = False

    def __next__(self) -> Any:
        inside = self._tap.__dict__
        run, name = inside["_run"], inside["_name"]
        if self._ended:
            raise StopIteration
        if inside["_newest"] is not self:
            raise BoundaryError(
                f"An older iterator of the loader {name!r} was asked for a batch after a newer one was made. "
                "Nothing was captured, and the newer one is as it was. Draw from one iterator of a loader at "
                "a time."
            )
        if self._source is None:
            self._source = run._open(name, inside["_loader"])
        try:
            return run._draw(name, self._source)
        except StopIteration:
            self._ended = True
            raise


def is_tap(value: object) -> bool:
    """`isinstance` does not work: it is the loader's."""
    return type(value) is Tap


def require(extra: str, *modules: str) -> None:
    """Raise OptionError, with the command that installs them, if a top-level module is missing."""
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        raise OptionError(
            f"flashckpt.{extra} needs {' and '.join(missing)}, which this environment does not have. Nothing "
            f"was started. Run: pip install 'flashckpt[{extra}]'"
        )


def refuse(reasons: Iterable[tuple[bool, str]]) -> None:
    """Raise OptionError for the first of these reasons that holds: the loop of this trainer cannot be resumed
    exactly."""
    for holds, why in reasons:
        if holds:
            raise OptionError(f"flashckpt cannot checkpoint this trainer: {why}. Nothing was started.")


def numbered(**kinds: Iterable[object]) -> dict[str, object]:
    """Name the parts of a state: the first of a kind "optimizer", further ones "optimizer1" and so on."""
    return {f"{kind}{n or ''}": part for kind, parts in kinds.items() for n, part in enumerate(parts)}


def by_class(callbacks: Iterable[Any]) -> dict[str, Any]:
    """Callbacks by the names of their classes; the second of a class is NAME-2."""
    named: dict[str, Any] = {}
    for callback in callbacks:
        name, number = type(callback).__name__, 1
        while (label := name if number == 1 else f"{name}-{number}") in named:
            number += 1
        named[label] = callback
    return named


def check_overridden(
    extra: str,
    package: str,
    tested: tuple[str, ...],
    overridden: Mapping[str, tuple[str, ...] | None],
) -> None:
    """Check the names of a framework that an integration calls or replaces.

    package: the distribution. tested: its releases ("1.15" is any 1.15.x). overridden:
    "module:Class.function" -> the names of its parameters, `self` included; None if it need only exist.

    Raises OptionError with each name that is missing or has other parameters. Warns, once in a process, if
    the release is not among `tested`.
    """
    version = importlib.metadata.version(package)
    changed = list(_changes(overridden))
    if changed:
        raise OptionError(
            f"{package} {version} is not the one that flashckpt.{extra} knows: {'; '.join(changed)}. Nothing "
            f"was started. Install a release of {package} {' or '.join(tested)}, or a newer flashckpt."
        )
    if not any(version == each or version.startswith(f"{each}.") for each in tested):
        _warn_untested(extra, package, version, tested)


def _changes(overridden: Mapping[str, tuple[str, ...] | None]) -> Iterator[str]:
    """Yield the names that are missing or have other parameters."""
    for name, expected in overridden.items():
        module, _, path = name.partition(":")
        try:
            found: Any = functools.reduce(getattr, path.split("."), importlib.import_module(module))
        except (ImportError, AttributeError):
            yield f"{path} of {module} is missing"
            continue
        if expected is None:
            continue
        try:
            parameters = tuple(inspect.signature(found).parameters)
        except (TypeError, ValueError):
            yield f"{path} of {module} is not a function any more"
            continue
        if parameters != expected:
            yield f"{path} of {module} takes ({', '.join(parameters)}) and not ({', '.join(expected)})"


@functools.cache
def _warn_untested(extra: str, package: str, version: str, tested: tuple[str, ...]) -> None:
    log.warning(
        "flashckpt.%s is tested with %s %s, and not with %s: all the functions that it relies on are there, "
        "but whether a resume is exact is not known.",
        extra, package, " and ".join(tested), version,
    )  # fmt: skip


# The first iteration makes what is made once (optimizer state, caches, buffers of metrics). Two iterations
# lie between the two that are compared: a value that moves in every second one, as with accumulation, moves.
FIRST, SECOND = 2, 4
# Bounds of the cost of one attribute. Of a longer container the length and both ends are compared; of a
# larger tensor, and of one on a device, identity and version.
_MOST_ENTRIES, _END_ENTRIES, _DEPTH, _MOST_BYTES = 1000, 50, 8, 1 << 16
# Values of an attribute that are compared, a KiB of a tensor counting as one: the loop waits for this.
_MOST_VALUES = 5000
_TABLES = (dict, defaultdict, OrderedDict, Counter)
_MODULE_INTERNALS = frozenset(vars(torch.nn.Module()))


class Unsaved:
    """Finds attributes of a trainer that change while it trains and that no checkpoint has: compares the
    values that a checkpoint could hold, in the attributes of trainer, callbacks and metrics, at the ends of
    the second and the fourth iteration, and warns once. Reads instance attributes only, and calls no property
    or method of the user's objects. Keeps digests, not values. Never synchronizes a device, and never raises.

    roots: the objects by their names in a message. known: for each root, the attributes that are saved or
    need not be. own: the attributes that the user names, as "attribute" or "root.attribute". saved: the
    objects of the state.
    """

    def __init__(
        self,
        roots: Mapping[str, object],
        known: Mapping[str, Collection[str]],
        own: Collection[str] = (),
        saved: Iterable[object] = (),
    ) -> None:
        self._roots, self._own, self._saved = dict(roots), frozenset(own), list(saved)
        self._known = {name: frozenset(names) for name, names in known.items()}
        self._calls = 0
        self._digests: dict[tuple[str, str], bytes] = {}
        self.found: tuple[str, ...] = ()

    def observe(self) -> None:
        """To be called at the end of each iteration; compares once. Then `found` has the changed attributes,
        as "root.attribute"."""
        self._calls += 1
        if self._calls == FIRST:
            self._digests = self._observed()
        elif self._calls == SECOND:
            self._compare(self._observed())
            self._roots, self._saved, self._digests = {}, [], {}

    def _observed(self) -> dict[tuple[str, str], bytes]:
        found, saved = {}, set(map(id, self._saved))
        for root, owner in self._roots.items():
            known = self._known.get(root, frozenset()) | self._own
            for name, value in _attributes(owner):
                is_known = name in known or f"{root}.{name}" in known
                if is_known or id(value) in saved or rng.is_global(value):
                    continue
                # What has no encoding is not compared; what cannot be read must not end a training run.
                with contextlib.suppress(Exception):
                    data = encode_json(_compared(value, 0, [_MOST_VALUES]))
                    found[root, name] = hashlib.blake2b(data, digest_size=16).digest()
        return found

    def _compare(self, now: Mapping[tuple[str, str], bytes]) -> None:
        # A new attribute has changed; a deleted one is as at the start.
        changed = [key for key, digest in now.items() if self._digests.get(key) != digest]
        if not changed:
            return
        self.found = tuple(f"{root}.{name}" for root, name in changed)
        shown = ", ".join(f"{type(self._roots[root]).__name__}.{name} ({root})" for root, name in changed)
        names = dict.fromkeys(name for _, name in changed)
        log.warning(
            "Attributes change while training and are not saved: %s. A resumed run begins with their first "
            "values, so it can differ from a run that was never stopped. Save them with own=(%s).",
            shown,
            ", ".join(f'"{name}"' for name in names) + "," * (len(names) == 1),
        )


def _attributes(owner: object) -> list[tuple[str, object]]:
    """The instance attributes, read past `__getattr__`, `__getattribute__` and properties."""
    try:
        found = object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return []
    internals = _MODULE_INTERNALS if issubclass(type(owner), torch.nn.Module) else frozenset()
    return [row for row in dict(found).items() if row[0] not in internals]


def _compared(value: Any, depth: int, left: list[int]) -> Any:
    """Return the part of a value that is compared. It has an encoding unless it holds an object of another
    kind. left: how many more values are compared in full; the rest is compared by length and identity."""
    kind = type(value)
    left[0] -= 1
    if issubclass(kind, Tensor):
        is_read = kind in (Tensor, torch.nn.Parameter) and value.device.type == "cpu" and left[0] >= 0
        if is_read and value.layout is torch.strided and value.nbytes <= _MOST_BYTES:
            left[0] -= value.nbytes >> 10
            data = value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            return [str(value.dtype), [*value.shape], hashlib.blake2b(data, digest_size=16).digest()]
        return [id(value), None if value.is_inference() else value._version]
    if kind is np.ndarray and (value.nbytes > _MOST_BYTES or left[0] < 0):
        return id(value)
    if kind in (str, bytes, bytearray) and len(value) > _MOST_BYTES:
        return [len(value), id(value)]
    if kind in (set, frozenset):
        shown = itertools.islice(value, max(0, min(_MOST_ENTRIES, left[0])))
        return [len(value), sorted(map(encode_json, shown))]
    if depth > _DEPTH or kind not in (*_TABLES, list, tuple, deque):
        return value
    entries: Any = value.items() if kind in _TABLES else value
    if left[0] < 0:
        entries = ()
    elif len(value) > _MOST_ENTRIES:
        last = itertools.islice(reversed(entries), _END_ENTRIES)
        entries = [*itertools.islice(entries, _END_ENTRIES), *last]
    found = []
    for each in entries:
        if left[0] < 0:
            break
        found.append(_compared(each, depth + 1, left))
    return [len(value), found]
