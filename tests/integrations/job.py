"""One attempt of a case, as the case sees it: what it reports and logs, and where the plan kills it.

Runs in the forked process. A case is a function `case(job) -> dict`: it trains and returns its record, a
nested dict of plain values and tensors. It reports each iteration (`job.step(n)`, n counted over all
attempts), each named moment (`moment(DRAW)`) and each value that it logs. The plan of the attempt names one
moment, at which the process kills itself: where a kill hits does not depend on the load of the machine.
"""

import functools
import hashlib
import json
import mmap
import os
import random
import signal
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

# Names of moments that cases report. A case may add names of its own; the planner covers all that occur.
START = "first second"  # by the harness, before the case begins
STEP = "in an iteration"  # by Job.step
DRAW = "in a draw"
ACCUMULATION = "in accumulation"
VALIDATION = "in validation"
SAVE = "in the trainer's save"
BETWEEN = "between the last batch and the epoch's end"
EPOCH_END = "in the epoch's end"
AFTER = "after the end"  # by the harness, after the case has returned, before its record is written

PLAIN, WHOLE, KILLED = "plain", "whole", "killed"


@dataclass(frozen=True)
class Kill:
    """A signal at the first moment `name` (the `nth` one) once iteration `counter` has begun.

    until: where that iteration begins before the signal was sent, it is sent there: a resumed attempt may
    have passed the place already. outside: the parent sends the signal, while the process runs on.
    in_worker: at the `nth` moment `name` reported by one of the loader's workers, in any iteration: the
    current iteration depends on how far the workers are ahead. A worker's first batches are drawn for the
    first iterations of an attempt; `counter` gives the kill its place in the plan.
    """

    name: str
    counter: int = 0
    nth: int = 1
    until: int | None = None
    number: int = signal.SIGKILL
    outside: bool = False
    in_worker: bool = False


@dataclass(frozen=True)
class Task:
    """What the parent asks of one attempt. folder: of the kind of run; records and logs are in `files`."""

    case: str
    kind: str
    folder: str
    files: str
    attempt: int
    options: dict[str, Any] = field(default_factory=dict)
    kill: Kill | None = None

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> "Task":
        found = json.loads(text)
        kill = found.pop("kill")
        return cls(**found, kill=None if kill is None else Kill(**kill))


IN_WORKER = -1  # the place of a moment that a worker reports
_WORDS = struct.Struct("<qqq")  # the newest iteration, armed moments passed, whether the signal was sent


class Job:
    """flashckpt: whether this attempt uses flashckpt. folder: for the trainer's own output, the same in all
    attempts of a run. run: the path of the flashckpt run. options: those of the test."""

    def __init__(self, task: Task) -> None:
        self.task, self.kill = task, task.kill
        self.folder, self.run, self.options = Path(task.folder), f"{task.folder}/run", task.options
        self.flashckpt = task.kind != PLAIN
        self.rank = int(os.environ.get("RANK", 0))
        self._pid = os.getpid()
        # Shared with the loader's workers, which are forked later and report draws.
        self._words = mmap.mmap(-1, _WORDS.size)
        flags = os.O_CREAT | os.O_APPEND | os.O_WRONLY
        self._moments = os.open(f"{task.files}/moments-{self.rank}-{task.attempt}", flags, 0o600)
        self._logged = os.open(f"{task.files}/logged-{self.rank}", flags, 0o600)
        self._own: dict[str, str] = {}
        self._in_worker = 0
        self._checkpointer: Any = None

    def step(self, number: int) -> None:
        """Iteration `number` (1, 2, ... over all attempts) is under way. To be called once in each."""
        self._put(0, number)
        if self.task.kind == KILLED:
            self._settle()
        self.moment(STEP)

    def continues(self, number: int) -> None:
        """The attempt stands behind iteration `number`, to which moments before its first `step` belong."""
        self._put(0, number)

    def moment(self, name: str) -> None:
        counter, passed, sent = _WORDS.unpack(self._words[:])
        in_worker = os.getpid() != self._pid
        self._write(self._moments, [name, IN_WORKER if in_worker else counter])
        kill = self.kill
        if kill is None or sent or kill.in_worker != in_worker:
            return
        if in_worker:
            self._in_worker += name == kill.name  # of this process alone: each worker has a copy
            if self._in_worker == kill.nth:
                self._send(kill, name)
            return
        if kill.until is not None and counter >= kill.until:
            self._send(kill, name)
        elif name == kill.name and counter >= kill.counter:
            self._put(1, passed + 1)
            if passed + 1 >= kill.nth:
                self._send(kill, name)

    def moments_in(self, owner: object, name: str, moment_name: str, *, after: bool = False) -> None:
        """Report a moment at each call of owner.name, before it, or after it and before its return."""
        function = getattr(owner, name)

        @functools.wraps(function)
        def wrapped(*arguments: Any, **named: Any) -> Any:
            if not after:
                self.moment(moment_name)
            result = function(*arguments, **named)
            if after:
                self.moment(moment_name)
            return result

        setattr(owner, name, wrapped)

    def log(self, key: object, values: Mapping[str, Any]) -> None:
        """Values logged at `key` (a step; any plain value that identifies the place over attempts). The same
        key and name twice in one attempt must have the same value."""
        for name, value in values.items():
            place, text = f"{key} {name}", json.dumps(_logged(value))
            if self._own.setdefault(place, text) != text:
                raise AssertionError(
                    f"{place!r} is logged twice with other values: {self._own[place]}, {text}"
                )
            self._write(self._logged, [self.task.attempt, place, text])

    def batch(self, number: object, batch: object) -> None:
        """The batch that an iteration is given, by its digest."""
        self.log(number, {"batch": digest(batch)})

    def remember_checkpointer(self) -> None:
        """Wrap the checkpointer's constructor: `step` waits on the newest one (see `_settle`)."""
        from flashckpt.checkpointer.run import Checkpointer

        made = Checkpointer.__init__

        @functools.wraps(made)
        def remembered(checkpointer: Any, *arguments: Any, **named: Any) -> None:
            self._checkpointer = checkpointer
            made(checkpointer, *arguments, **named)

        Checkpointer.__init__ = remembered  # type: ignore[method-assign]

    def _settle(self) -> None:
        """Wait for slots and for the last snapshot's seal: iterations of a millisecond would pass all
        boundaries before the first snapshot, and each attempt would begin at the start."""
        from tests.waiting import until_room, until_slots

        if self._checkpointer is not None:
            until_slots(self._checkpointer)
            until_room(self._checkpointer)

    def _put(self, word: int, value: int) -> None:
        struct.pack_into("<q", self._words, 8 * word, value)

    def _send(self, kill: Kill, name: str) -> None:
        self._put(2, 1)
        self._write(self._moments, ["kill", name])
        if not kill.outside:
            os.kill(self._pid, kill.number)

    def _write(self, descriptor: int, value: object) -> None:
        os.write(descriptor, (json.dumps(value) + "\n").encode())


current: list[Job] = []


def begin(task: Task) -> Job:
    """The job of this process."""
    current[:] = [Job(task)]
    return current[0]


def moment(name: str) -> None:
    """Report a moment to this process's job; does nothing outside of one."""
    if current:
        current[0].moment(name)


def _logged(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return digest(value) if value.numel() > 1 else value.item()
    return plain(value)


def digest(value: object) -> str:
    """Of a batch: nested containers of tensors and plain values."""
    found = hashlib.blake2b(digest_size=8)

    def add(part: Any) -> None:
        if isinstance(part, torch.Tensor):
            data = part.detach().cpu().contiguous()
            found.update(f"{data.dtype}{tuple(data.shape)}".encode())
            found.update(data.reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(part, Mapping):
            for key in part:
                found.update(repr(key).encode())
                add(part[key])
        elif isinstance(part, Sequence) and not isinstance(part, str | bytes):
            found.update(str(len(part)).encode())
            for each in part:
                add(each)
        else:
            found.update(repr(part).encode())

    add(value)
    return found.hexdigest()


def random_numbers() -> dict[str, Any]:
    """The state of the global generators."""
    numpy: Any = np.random.get_state(legacy=False)
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    device = torch.cuda.get_rng_state() if used else None
    return {"torch": torch.get_rng_state(), "numpy": numpy, "python": random.getstate(), "device": device}


def gradients(module: torch.nn.Module) -> dict[str, Any]:
    return {name: each.grad for name, each in module.named_parameters()}


def plain(value: Any, path: str = "") -> Any:
    """A record as dicts, lists, plain values and tensors, which `torch.load(weights_only=True)` takes. Raises
    TypeError for any other object, with its place: a record must not compare objects by their address."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, DTensor):
        value = value.to_local()  # this rank's part
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, np.ndarray | np.generic):
        # NumPy's words of 32 bits without a sign are no dtype of every torch operation.
        return {"dtype": str(value.dtype), "values": plain(value.tolist(), path)}
    if isinstance(value, Mapping):
        return {_key(key): plain(each, f"{path}.{key}") for key, each in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((plain(each, path) for each in value), key=repr)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, torch.dtype | torch.device):
        return str(value)
    if isinstance(value, int | float | str):
        return _base(value)
    if isinstance(value, Sequence) or hasattr(value, "popleft"):
        return [plain(each, f"{path}[{number}]") for number, each in enumerate(value)]
    raise TypeError(f"the record has a {type(value).__name__} at {path or 'its root'}: give its plain values")


def _base(value: Any) -> Any:
    """The value of a subclass of a plain type."""
    return next(kind(value) for kind in (int, float, str) if isinstance(value, kind))


def _key(key: object) -> Any:
    return key if type(key) in (int, str) else repr(key)
