"""All options, frozen. Owns every read of the environment."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, get_args

from flashckpt.errors import OptionError

# Each slot is a region that a keeper holds, and a copy of the state.
MOST_SLOTS = 16
# The options of one store, as JSON. A bundle of a system's root certificates takes a quarter of it.
MAX_STORAGE_BYTES = 1 << 20
_UNITS_S = {"ms": 1e-3, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|min|m|h|d)\s*")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i)?)?B?", re.IGNORECASE)


Compress = Literal["auto", "zstd", "none"]


def duration_s(text: str, option: str) -> float:
    """Return the seconds of a duration such as "30s", "5min" or "1.5h". Raises OptionError for other text."""
    match = _DURATION.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise OptionError(
            f"{option}={text!r} is not a duration. Nothing was changed. "
            'Write a number and a unit: "500ms", "30s", "5min", "2h", "1d".'
        )
    return float(match[1]) * _UNITS_S[match[2]]


def size_of(text: object) -> int | None:
    """Return the bytes of a size, a number or text: "5GB" is 5e9, "5GiB" 5 * 2**30. None for other text and
    for 0."""
    match = _SIZE.fullmatch(str(text).strip()) if type(text) in (int, str) else None
    if match is None:
        return None
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** " KMGT".index((match[2] or " ").upper())) or None


def check_call(call: Call) -> None:
    """Check the arguments of `attach` and `loop` other than the state. Raises OptionError before anything is
    started: an option that is not understood could mean that nothing is saved."""
    if call.every is not None and call.every != "auto" and not _is_count(call.every, 1):
        _refuse(
            f"every={call.every!r}",
            'Pass "auto", a number of steps, or None: how often a snapshot is taken into memory. '
            "persist_every takes durations: how often one is committed.",
        )
    check_interval(call.persist_every, "persist_every")
    for name, kind, example in (("keep", Keep, "last=3"), ("options", Options, "slots=2")):
        if not isinstance(value := getattr(call, name), kind):
            # Without the value: a dictionary may hold the keys of a store.
            right = f"flashckpt.{kind.__name__}"
            _refuse(f"{name}={type(value).__name__}", f"Pass a {right}, as in {name}={right}({example}).")
    _check_remote(call)
    _check_cache(call.cache, call.options)


def _refuse(what: str, remedy: str) -> NoReturn:
    raise OptionError(f"{what} is invalid. Nothing was started. {remedy}")


def check_interval(value: object, option: str) -> None:
    """Raise OptionError unless the value is a duration, a number of steps or None."""
    if isinstance(value, str):
        duration_s(value, option)
    elif value is not None and not _is_count(value, 1):
        _refuse(f"{option}={value!r}", 'Pass a duration such as "5min", a number of steps, or None.')


def checked_compress(value: object, name: str = "compress") -> Compress:
    """Return the value. Raises OptionError if it is not a `Compress`."""
    for each in get_args(Compress):
        if value == each:
            found: Compress = each
            return found
    _refuse(f"{name}={value!r}", "Pass 'auto', 'zstd' or 'none': how shards are compressed, without loss.")


def _check_remote(call: Call) -> None:
    if call.remote is None:
        for name in ("remote_every", "remote_keep"):
            if (value := getattr(call, name)) is not None:
                raise OptionError(
                    f"{name}={value!r} needs a remote. Nothing was started. Pass one, as in "
                    'remote="s3://bucket/run", or leave this option out.'
                )
        return
    if not isinstance(call.remote, (str, os.PathLike)):
        _refuse(f"remote={call.remote!r}", "Pass a folder, a URL, or None.")
    check_interval(call.remote_every, "remote_every")
    if call.remote_keep is not None and not isinstance(call.remote_keep, Keep):
        _refuse(
            f"remote_keep={call.remote_keep!r}",
            "Pass a flashckpt.Keep, as in flashckpt.Keep(last=3), or None for the same as keep.",
        )


def _check_cache(path: object, options: object) -> None:
    if path is None:
        limit = getattr(options, "cache_limit", None)
        if limit is not None:
            raise OptionError(
                f"cache_limit={limit!r} needs a cache. Nothing was started. Pass a folder on a disk of each "
                'node, as in cache="/nvme", or leave this option out.'
            )
        return
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(text, str) or not text.strip() or "\0" in text or "://" in text:
        _refuse(
            f"cache={path!r}",
            "Pass a folder on a disk of this node, or None. Object storage is the run's path or its remote, "
            'as in attach("s3://bucket/run", cache="/nvme").',
        )


_SHELL_VARIABLE = re.compile(r"\$(?:[A-Za-z_]\w*|\{[^}/]*\})")


def user_path(path: str | os.PathLike[str]) -> str:
    """Return a local path that the user names, absolute. A `~` or `~user` at its beginning is replaced as a
    shell does it, since a quoted or configured path has met no shell.

    Raises OptionError for `~` as a further component, and for $NAME: no shell has replaced it either, and a
    folder of that name would be made. A name that exists is taken as it is."""
    text = os.path.expanduser(os.fspath(path))
    if "$" in text or "~" in text:
        whole = os.path.abspath(text)
        place = ""
        for part in whole.split(os.sep):
            place = f"{place}{part}{os.sep}"
            found = "~" if part == "~" else next(iter(_SHELL_VARIABLE.findall(part)), None)
            if found is not None and not os.path.lexists(place.rstrip(os.sep)):
                raise OptionError(
                    f"{os.fspath(path)!r} has {found} in it, which only a shell replaces; a folder of that "
                    f"name would be made. Nothing was changed. Write the path in full, or pass "
                    "os.path.expandvars(path). If a folder has this name, make it first."
                )
    return os.path.abspath(text)


def _is_count(value: object, least: int) -> bool:
    return type(value) is int and value >= least


# Signals that report a fault of the process, or that other libraries need.
_UNSUPPORTED_SIGNALS = {
    "SIGKILL", "SIGSTOP", "SIGCHLD", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT",
}  # fmt: skip


def signal_numbers(names: Sequence[str], option: str) -> tuple[int, ...]:
    """Return the numbers of signals with these names, as in ("SIGTERM", "SIGINT"). Raises OptionError."""
    known = signal.Signals.__members__
    for name in [names] if isinstance(names, str) else names:
        if isinstance(names, str) or name not in known or name in _UNSUPPORTED_SIGNALS:
            raise OptionError(
                f"{option}={names!r}: flashckpt cannot handle {name!r}. Nothing was started. Give a tuple of "
                'names of signals that may wait for a boundary, such as ("SIGTERM", "SIGINT"), or ().'
            )
    return tuple(int(known[name]) for name in dict.fromkeys(names))


@dataclass(frozen=True, kw_only=True)
class Keep:
    """The committed steps that are kept: the newest `last` (at least 2 always stay), and every multiple of
    `every_steps`, in steps."""

    last: int = 3
    every_steps: int | None = None

    def __post_init__(self) -> None:
        if not _is_count(self.last, 1):
            _refuse(f"Keep(last={self.last!r})", "Pass a number of steps, 1 or more.")
        if self.every_steps is not None and not _is_count(self.every_steps, 1):
            _refuse(f"Keep(every_steps={self.every_steps!r})", "Pass a number of steps, 1 or more, or None.")


@dataclass(frozen=True, kw_only=True)
class Remote:
    """A second store to which committed steps are copied. every: how often, see `flashckpt.attach`. keep: the
    steps that are kept there. options: further arguments of its client. compress: of its shards."""

    url: str
    every: str | int | None = None
    keep: Keep = Keep()
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    compress: Compress = "none"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options that are rarely changed.

    overhead: share of the loop's time that captures may cost with every="auto" (0.01 is 1 %).
    slots: snapshots held in host memory, 16 at most. None takes 3 if they fit into half of the available
        memory, else 2. With 1, each snapshot is committed before the next replaces it, and a kill in a
        capture falls back to storage.
    device_memory: bytes of each device for clones of large leaves, so that the loop does not wait for their
        copies to the host.
    streams: device streams that write the state, other than the current and the default ones.
    linger: how long the keeper stays after an abnormal death and waits for the next attempt.
    grace: how long `wait()` and the end of a run wait while nothing is written or writing fails, and then the
        keeper; after a signal, the total time from the signal until it takes effect.
    signals: signals that end the loop at its next boundary, and then act as without flashckpt.
    warning_signals: signals after which the loop ends in the same way and the process continues. None takes
        SIGUSR1 in a Slurm job, unless the process handles or ignores it itself.
    notice_file: a path. Creating or writing the file while the loop runs acts as a warning signal.
    read_ahead_check: refuse a second batch before the first was trained on.
    threads: native threads for copies. None takes torch's own number.
    watchdog: the time without a boundary after which the trainer counts as stuck, a duration; "auto"
        derives it from the run's own steps (10 minutes at least), None disables the watchdog.
    watchdog_action: "report" writes the Python stacks of a stuck trainer to the event log and persists the
        newest snapshot; "kill" also ends the trainer with SIGKILL, so that its launcher restarts it.
    storage_options: arguments of an object store's client other than the URL (`endpoint`, `region`,
        `access_key_id` …: the keywords of obstore). The client takes missing ones from the environment. They
        are never written to storage; the keeper gets them from the trainer that starts it.
    remote_storage_options: the same for `remote`. None takes `storage_options`.
    remote_compress: compress shards in `remote`, without loss: "auto" on an object store if they shrink,
        "zstd" always.
    cache_limit: the most that this run may take of the disk of `cache` on each node, in bytes or as text
        ("500GB"). None takes the free space except 5 % of the disk.
    """

    overhead: float = 0.01
    slots: int | None = None
    device_memory: int = 0
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
    cache_limit: int | str | None = None

    def __post_init__(self) -> None:
        def check(name: str, is_valid: bool, remedy: str) -> None:
            if not is_valid:
                _refuse(f"{name}={getattr(self, name)!r}", f"Pass {remedy}.")

        is_share = isinstance(self.overhead, (int, float)) and 0 < self.overhead < 1
        slots = MOST_SLOTS if self.slots is None else self.slots
        threads = 1 if self.threads is None else self.threads
        is_size = self.cache_limit is None or size_of(self.cache_limit) is not None
        check("overhead", is_share, "a share of the loop's time, between 0 and 1")
        check("slots", _is_count(slots, 1) and slots <= MOST_SLOTS, f"a number, 1 to {MOST_SLOTS}, or None")
        check("threads", _is_count(threads, 1), "a number, 1 or more, or None")
        check("device_memory", _is_count(self.device_memory, 0), "a number of bytes")
        check("notice_file", isinstance(self.notice_file, (str, os.PathLike, type(None))), "a path, or None")
        check("watchdog_action", self.watchdog_action in ("report", "kill"), '"report" or "kill"')
        check("cache_limit", is_size, 'a size such as "500GB", a number of bytes, or None')
        duration_s(self.linger, "linger")
        duration_s(self.grace, "grace")
        if self.watchdog not in (None, "auto") and not duration_s(str(self.watchdog), "watchdog"):
            _refuse(f"watchdog={self.watchdog!r}", 'Pass a duration above 0, "auto" or None.')
        ending = signal_numbers(self.signals, "signals")
        warning = signal_numbers(self.warning_signals or (), "warning_signals")
        if both := [signal.Signals(number).name for number in warning if number in ending]:
            raise OptionError(
                f"signals and warning_signals both name {', '.join(both)}. Nothing was started. Name each "
                "signal in one of them."
            )
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

    @property
    def cache_limit_bytes(self) -> int | None:
        return None if self.cache_limit is None else size_of(self.cache_limit)


@dataclass(frozen=True, kw_only=True)
class Call:
    """The arguments of `flashckpt.attach` but the state; see there, and `check_call`."""

    path: str | os.PathLike[str]
    every: int | Literal["auto"] | None = "auto"
    persist_every: str | int | None = "5min"
    keep: Keep = field(default_factory=lambda: Keep(last=3))
    remote: str | os.PathLike[str] | None = None
    remote_every: str | int | None = None
    remote_keep: Keep | None = None
    cache: str | os.PathLike[str] | None = None
    options: Options = field(default_factory=Options)


@dataclass(frozen=True, kw_only=True)
class Environment:
    """This process's place in its job and on its machine, from the environment. job_id, restart_count: the
    job, and how often it was restarted, if the scheduler distinguishes a restart from another job.

    Slurm does: each job has its own number, and Slurm counts a restart after it has ended all processes of
    the job. Of other schedulers FLASHCKPT_JOB says it, as ID/COUNT. torchrun does not: its id is the user's
    text (two jobs may have the same), and its count of restarts also grows if a job was refused.
    """

    rank: int = 0
    world: int = 1
    names_rank: bool = True
    """False if WORLD_SIZE is set and RANK is not, as in processes that Lightning's launcher starts: only
    torch.distributed knows the rank."""
    names_world: bool = True
    """False if WORLD_SIZE is not set."""
    local_rank: int = 0
    local_world: int = 1
    job_id: str = ""
    restart_count: int = 0
    runtime_folder: str | None = None
    under_slurm: bool = False
    restarts_left: int = 0
    """The number of times that torchrun would still restart the ranks."""
    shares_rendezvous_store: bool = False
    """Ranks meet in the store of torchrun's rendezvous, which keeps the addresses of dead ranks."""

    @classmethod
    def read(cls) -> Environment:
        """Read the launcher's variables and Slurm's. FLASHCKPT_RUNTIME moves the runtime folder (tests use
        it). OptionError if FLASHCKPT_JOB is malformed."""
        get = os.environ.get
        slurm_job = get("SLURM_JOB_ID", "")
        job_id, restart_count = _scheduled()
        restarts = _number("TORCHELASTIC_MAX_RESTARTS", 0) - _number("TORCHELASTIC_RESTART_COUNT", 0)
        return cls(
            rank=_number("RANK", 0),
            world=_number("WORLD_SIZE", 1),
            names_rank="RANK" in os.environ or "WORLD_SIZE" not in os.environ,
            names_world=bool(get("WORLD_SIZE")),
            local_rank=_number("LOCAL_RANK", 0),
            local_world=_number("LOCAL_WORLD_SIZE", 1),
            job_id=job_id,
            restart_count=restart_count,
            runtime_folder=get("FLASHCKPT_RUNTIME") or None,
            under_slurm=bool(slurm_job),
            restarts_left=max(0, restarts),
            shares_rendezvous_store=get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )

    def check_alone(self) -> None:
        """Raise OptionError if the launcher's variables name a rank that cannot train by itself. For a
        process that is in no process group of several ranks."""
        if self.world == 1 and self.rank == 0:
            return
        if not self.names_world:
            why = f"RANK={self.rank} without WORLD_SIZE: how many ranks there are is unknown"
        elif self.rank >= self.world:
            why = f"RANK={self.rank} of WORLD_SIZE={self.world}: there is no such rank"
        else:
            why = (
                f"WORLD_SIZE={self.world}: this process was started as one of several, and there is no "
                "process group"
            )
        raise OptionError(
            f"{why}. Nothing was started. Start ranks by torchrun or another launcher that sets RANK and "
            "WORLD_SIZE, and call torch.distributed.init_process_group before flashckpt.attach or "
            "flashckpt.loop; for a process that a launcher started among others and that trains by itself, "
            "unset RANK and WORLD_SIZE."
        )


def _scheduled() -> tuple[str, int]:
    """The job, and how often its scheduler has restarted it."""
    if named := os.environ.get("FLASHCKPT_JOB", ""):
        job_id, _, count = named.rpartition("/")
        if not (job_id and count.isascii() and count.isdecimal() and len(count) < 10):
            raise OptionError(
                f"FLASHCKPT_JOB={named!r} is not ID/COUNT: the name of the job, and how often its scheduler "
                "has restarted it. Nothing was started."
            )
        return f"FLASHCKPT_JOB={job_id}", int(count)
    if slurm_job := os.environ.get("SLURM_JOB_ID", ""):
        return f"{os.environ.get('SLURM_CLUSTER_NAME', '')}/{slurm_job}", _number("SLURM_RESTART_COUNT", 0)
    return "", 0


def is_switched_off() -> bool:
    """Whether FLASHCKPT=off (or 0, false, no) disables this library."""
    return os.environ.get("FLASHCKPT", "").strip().lower() in ("off", "0", "false", "no")


def crash_at() -> str:
    """Return the point at which a test ends this process (see crashpoints.py); empty outside of tests."""
    return os.environ.get("FLASHCKPT_CRASH_AT", "")


def storage_options() -> dict[str, Any]:
    """Return the options in FLASHCKPT_STORAGE_OPTIONS, mainly for the shell. Raises OptionError unless it is
    a JSON object of plain values; the error shows no value."""
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
            f"{name} is invalid. Nothing was changed. Give names with plain values (text, numbers, true or "
            'false), such as {"endpoint": "https://storage.example", "region": "eu-1"}.'
        )
    if (num_bytes := len(json.dumps(dict(options)))) > MAX_STORAGE_BYTES:
        raise OptionError(
            f"{name} takes {num_bytes:,} bytes as JSON, and the keeper accepts {MAX_STORAGE_BYTES:,}. "
            "Nothing was changed. Leave out what the store does not need, such as further root certificates."
        )


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else default
