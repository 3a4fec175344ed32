"""Every option there is, frozen, and the only place where the environment is read."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from flashckpt.errors import OptionError

# Each is a region that a keeper holds, and a copy of the state.
MOST_SLOTS = 16
# The options of one store, as JSON: a bundle of all root certificates of a system is a quarter of it.
MAX_STORAGE_BYTES = 1 << 20
_UNITS_S = {"ms": 1e-3, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|min|m|h|d)\s*")


Compress = Literal["auto", "zstd", "none"]


def duration_s(text: str, option: str) -> float:
    """Seconds in a duration such as "30s", "5min" or "1.5h". Raises OptionError for anything else."""
    match = _DURATION.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise OptionError(
            f"{option}={text!r} is not a duration. Nothing was changed. "
            'Write a number and a unit: "500ms", "30s", "5min", "2h", "1d".'
        )
    return float(match[1]) * _UNITS_S[match[2]]


def check_call(
    every: object, persist_every: object, keep: object, options: object, remote: RemoteCall | None = None
) -> None:
    """What `attach` and `loop` take beside the state. Raises OptionError, before anything is done: a word
    that is not understood would otherwise mean that nothing is saved."""
    if every is not None and every != "auto" and not _is_count(every, 1):
        raise OptionError(
            f'every={every!r}: "auto", a number of steps, or None. Nothing was started. It says how often a '
            "snapshot is taken into memory; how often one goes to disk is persist_every, which may be a time."
        )
    check_interval(persist_every, "persist_every")
    for name, value, kind in (("keep", keep, Keep), ("options", options, Options)):
        if not isinstance(value, kind):
            raise OptionError(
                # Without the value: a dictionary may hold the keys of a store.
                f"{name}={type(value).__name__}: a flashckpt.{kind.__name__}, as in "
                f"{name}=flashckpt.{kind.__name__}"
                f"({'last=3' if kind is Keep else 'slots=2'}). Nothing was started."
            )
    if remote is not None:
        _check_remote(remote)


def check_interval(value: object, option: str) -> None:
    """Raises OptionError for what is neither a duration, a number of steps nor None."""
    if isinstance(value, str):
        duration_s(value, option)
    elif value is not None and not _is_count(value, 1):
        raise OptionError(
            f'{option}={value!r}: a duration such as "5min", a number of steps, or None. Nothing was started.'
        )


def checked_compress(value: object, name: str = "compress") -> Compress:
    """OptionError for what is no way to compress."""
    for each in get_args(Compress):
        if value == each:
            found: Compress = each
            return found
    raise OptionError(
        f"{name}={value!r}. Nothing was changed. It is 'auto', 'zstd' or 'none': whether shards are "
        "compressed on their way, without loss."
    )


def _check_remote(remote: RemoteCall) -> None:
    if remote.path is None:
        for name, value in (("remote_every", remote.every), ("remote_keep", remote.keep)):
            if value is not None:
                raise OptionError(
                    f"{name}={value!r}: there is no remote. Nothing was started. Name one, as in "
                    'remote="s3://bucket/run", or leave this out.'
                )
        return
    if not isinstance(remote.path, (str, os.PathLike)):
        raise OptionError(f"remote={remote.path!r}: a folder or a URL, or None. Nothing was started.")
    check_interval(remote.every, "remote_every")
    if remote.keep is not None and not isinstance(remote.keep, Keep):
        raise OptionError(
            f"remote_keep={remote.keep!r}: a flashckpt.Keep, as in remote_keep=flashckpt.Keep(last=3), or "
            "None for the same as keep. Nothing was started."
        )


def _is_count(value: object, least: int) -> bool:
    return type(value) is int and value >= least


# Faults of the process itself and what other libraries live by: no boundary may wait for these.
_NOT_TO_BE_WATCHED = {"SIGKILL", "SIGSTOP", "SIGCHLD", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT"}


def signal_numbers(names: Sequence[str], option: str) -> tuple[int, ...]:
    """The numbers of signals given by their names, as in ("SIGTERM", "SIGINT"). Raises OptionError."""
    known = signal.Signals.__members__
    for name in [names] if isinstance(names, str) else names:
        if isinstance(names, str) or name not in known or name in _NOT_TO_BE_WATCHED:
            raise OptionError(
                f"{option}={names!r}: {name!r} cannot be watched. Nothing was changed. Give a tuple of names "
                'of signals that a process may wait with, such as ("SIGTERM", "SIGINT"); () for none.'
            )
    return tuple(int(known[name]) for name in dict.fromkeys(names))


@dataclass(frozen=True, kw_only=True)
class Keep:
    """Which committed steps stay: the newest `last` (at least 2 always stay), and every multiple of
    `every_steps`, counted in steps."""

    last: int = 3
    every_steps: int | None = None

    def __post_init__(self) -> None:
        if not _is_count(self.last, 1):
            raise OptionError(f"Keep(last={self.last!r}): a number of steps, at least one must be kept.")
        if self.every_steps is not None and not _is_count(self.every_steps, 1):
            raise OptionError(f"Keep(every_steps={self.every_steps!r}): must be a positive number of steps.")


@dataclass(frozen=True, kw_only=True)
class RemoteCall:
    """What `attach` was called with of a remote; see `check_call`."""

    path: str | os.PathLike[str] | None = None
    every: str | int | None = None
    keep: Keep | None = None


@dataclass(frozen=True, kw_only=True)
class Remote:
    """A second store that committed steps are copied to. `every`: how often, see `flashckpt.attach`; `keep`:
    which stay there; `options`: what its client takes beside the URL; `compress`: whether shards stand so."""

    url: str
    every: str | int | None = None
    keep: Keep = Keep()
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    compress: Compress = "none"


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is rarely changed.

    overhead: share of the loop's time that captures may cost with every="auto" (0.01 is 1 %).
    slots: snapshots held in host memory, 16 at most; None takes 3 where they fit into half of what is
        available, else 2. With 1 a snapshot is committed before the next takes its place, and a kill in a
        capture falls back to the disk.
    device_memory: bytes a device that the clone arena may take; None takes up to half of what is free.
    streams: further device streams that write the state, beside the current and the default ones.
    linger: how long the keeper stays after an abnormal death, waiting for the next attempt.
    grace: how long `wait()` and the end of a run go on waiting while nothing is written, or writing fails;
        after a signal, how long in all, from the signal on, until it takes its course.
    signals: signals that end the loop at its next boundary, and then do what they would have done.
    warning_signals: signals after which the loop ends in the same way and the process goes on. None takes
        SIGUSR1 in a Slurm job, unless the process handles or ignores it itself.
    notice_file: a path; a file that appears there while the loop runs, or is made anew, is such a warning.
    read_ahead_check: refuse a second batch before the first was trained on.
    threads: native threads for copies; None takes torch's own number.
    watchdog: how long a boundary may be missing before the trainer counts as stuck, a duration; "auto"
        takes it from the run's own steps (10 minutes at least), None watches nothing.
    watchdog_action: what becomes of a stuck trainer. "report" writes its Python stacks into the ledger and
        persists the newest snapshot; "kill" also ends it with SIGKILL, so that its launcher restarts it.
    storage_options: what the client of an object store takes beside the URL (`endpoint`, `region`,
        `access_key_id` …: the keywords of obstore); what is not here it takes from the environment. None of
        it is written down; the keeper gets it from the trainer that starts it.
    remote_storage_options: the same for `remote`; None takes `storage_options`.
    remote_compress: whether shards stand compressed in `remote`, without loss: "auto" where they arrive
        earlier so, "zstd" always.
    """

    overhead: float = 0.01
    slots: int | None = None
    device_memory: int | None = None
    streams: Sequence[object] = ()
    linger: str = "30min"
    grace: str = "60s"
    signals: Sequence[str] = ("SIGTERM", "SIGINT")
    warning_signals: Sequence[str] | None = None
    notice_file: str | os.PathLike[str] | None = None
    read_ahead_check: bool = True
    threads: int | None = None
    watchdog: str | None = "auto"
    watchdog_action: Literal["report", "kill"] = "report"
    storage_options: Mapping[str, str | int | float | bool] = field(default_factory=dict, repr=False)
    remote_storage_options: Mapping[str, str | int | float | bool] | None = field(default=None, repr=False)
    remote_compress: Compress = "none"

    def __post_init__(self) -> None:
        if not (isinstance(self.overhead, (int, float)) and 0 < self.overhead < 1):
            raise OptionError(f"overhead={self.overhead!r}: a share of the loop's time, between 0 and 1.")
        if self.slots is not None and not _is_count(self.slots, 1):
            raise OptionError(f"slots={self.slots!r}: a number of snapshots to hold, at least one.")
        if self.slots is not None and self.slots > MOST_SLOTS:
            raise OptionError(
                f"slots={self.slots!r}: {MOST_SLOTS} are the most that a keeper gives a trainer."
            )
        if self.threads is not None and not _is_count(self.threads, 1):
            raise OptionError(f"threads={self.threads!r}: a number; at least one thread must copy.")
        if self.device_memory is not None and not _is_count(self.device_memory, 0):
            raise OptionError(f"device_memory={self.device_memory!r}: a number of bytes, or None.")
        if self.notice_file is not None and not isinstance(self.notice_file, (str, os.PathLike)):
            raise OptionError(f"notice_file={self.notice_file!r}: a path, or None.")
        duration_s(self.linger, "linger")
        duration_s(self.grace, "grace")
        _check_watchdog(self.watchdog, self.watchdog_action)
        _check_signals(self.signals, self.warning_signals or ())
        _check_storage(self.storage_options, "storage_options")
        if self.remote_storage_options is not None:
            _check_storage(self.remote_storage_options, "remote_storage_options")
        checked_compress(self.remote_compress, "remote_compress")

    @property
    def linger_s(self) -> float:
        return duration_s(self.linger, "linger")

    @property
    def grace_s(self) -> float:
        return duration_s(self.grace, "grace")


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What the environment says of this process: its place in the job and on its machine, and where the
    scheduler tells a job's restart from another job, the job's name and how often it was restarted.

    Slurm does: it gives a number to one job alone, and counts a restart after it has ended all processes of
    the job. torchrun does not: its id is what its user wrote (the same in two jobs, "none" where nothing was
    written), and its count of restarts rises where a job was refused, too.
    """

    rank: int = 0
    world: int = 1
    names_rank: bool = True
    """False where WORLD_SIZE is set and RANK is not, as in processes that Lightning's launcher starts: only
    torch.distributed knows the rank."""
    local_rank: int = 0
    local_world: int = 1
    job_id: str = ""
    restart_count: int = 0
    runtime_folder: str | None = None
    under_slurm: bool = False
    restarts_left: int = 0
    """How often torchrun would still restart the ranks."""
    shares_rendezvous_store: bool = False
    """Ranks meet in the store of torchrun's rendezvous, which keeps the addresses of dead ranks."""

    @classmethod
    def read(cls) -> Environment:
        """Read the launcher's variables and Slurm's. FLASHCKPT_RUNTIME moves the runtime folder (tests use
        it)."""
        get = os.environ.get
        slurm_job = get("SLURM_JOB_ID", "")
        restarts = _number("TORCHELASTIC_MAX_RESTARTS", 0) - _number("TORCHELASTIC_RESTART_COUNT", 0)
        return cls(
            rank=_number("RANK", 0),
            world=_number("WORLD_SIZE", 1),
            names_rank="RANK" in os.environ or "WORLD_SIZE" not in os.environ,
            local_rank=_number("LOCAL_RANK", 0),
            local_world=_number("LOCAL_WORLD_SIZE", 1),
            job_id=f"{get('SLURM_CLUSTER_NAME', '')}/{slurm_job}" if slurm_job else "",
            restart_count=_number("SLURM_RESTART_COUNT", 0),
            runtime_folder=get("FLASHCKPT_RUNTIME") or None,
            under_slurm=bool(slurm_job),
            restarts_left=max(0, restarts),
            shares_rendezvous_store=get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )


def is_switched_off() -> bool:
    """Whether FLASHCKPT=off (or 0, false, no) asks for loops as they would be without this library."""
    return os.environ.get("FLASHCKPT", "").strip().lower() in ("off", "0", "false", "no")


def crash_at() -> str:
    """The point at which a test wants this process to die (see crashpoints.py); empty outside of tests."""
    return os.environ.get("FLASHCKPT_CRASH_AT", "")


def storage_options() -> dict[str, Any]:
    """What FLASHCKPT_STORAGE_OPTIONS says, for the shell above all. OptionError where it is no JSON object of
    plain values; none of them is shown."""
    text = os.environ.get("FLASHCKPT_STORAGE_OPTIONS", "")
    try:
        found = json.loads(text or "{}")
    except ValueError:
        found = None
    _check_storage(found, "FLASHCKPT_STORAGE_OPTIONS")
    assert isinstance(found, dict)
    return found


def _check_storage(options: object, name: str) -> None:
    kinds = (str, int, float, bool)
    if not isinstance(options, Mapping) or not all(
        isinstance(key, str) and isinstance(value, kinds) for key, value in options.items()
    ):
        raise OptionError(
            f"{name}: names and plain values (text, numbers, true or false), such as "
            '{"endpoint": "https://storage.example", "region": "eu-1"}. Nothing was changed.'
        )
    if (num_bytes := len(json.dumps(dict(options)))) > MAX_STORAGE_BYTES:
        raise OptionError(
            f"{name}: {num_bytes:,} bytes as JSON, and the keeper takes {MAX_STORAGE_BYTES:,}. Nothing was "
            "changed. Leave out what the store does not need, such as further root certificates."
        )


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else default


def _check_watchdog(limit: str | None, action: str) -> None:
    if limit not in (None, "auto") and duration_s(limit, "watchdog") <= 0:
        raise OptionError(f'watchdog={limit!r}: no time at all. Write a duration, "auto" or None.')
    if action not in ("report", "kill"):
        raise OptionError(f'watchdog_action={action!r}: "report" or "kill".')


def _check_signals(ending: Sequence[str], warning: Sequence[str]) -> None:
    numbers = signal_numbers(ending, "signals")
    both = [number for number in signal_numbers(warning, "warning_signals") if number in numbers]
    if both:
        names = ", ".join(signal.Signals(number).name for number in both)
        raise OptionError(f"signals and warning_signals both name {names}: choose one of them.")
