"""The shell's exit codes. Scripts depend on them: pinned by a test, listed in docs/errors.md."""

from __future__ import annotations

from enum import IntEnum

from flashckpt.errors import DamagedError, RunError, UsageError


class ExitCode(IntEnum):
    """What each code says, of every command; `recover` ends with the worst that holds."""

    WELL = 0
    """Done. recover: all that survived and still counts is saved, and nothing is damaged."""
    DAMAGED = 1
    """Damage was found: bytes at rest, or (recover) a snapshot in memory that was let go for it."""
    USAGE = 2
    """Wrong usage. export: OUT is there already and --force was not given."""
    UNUSABLE_RUN = 3
    """The run cannot be used as asked: held by a job or another recovery, not there, no such step.
    recover: training could not go on from any step. prune: nothing may be deleted yet."""
    FAILED = 4
    """Anything else. recover: something could not be saved; it is still where it was."""
    INTERRUPTED = 130


def exit_code(error: BaseException) -> ExitCode:
    """The code with which a command ends that `error` ended."""
    if isinstance(error, DamagedError):
        return ExitCode.DAMAGED
    if isinstance(error, UsageError):
        return ExitCode.USAGE
    if isinstance(error, RunError):
        return ExitCode.UNUSABLE_RUN
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    return ExitCode.FAILED
