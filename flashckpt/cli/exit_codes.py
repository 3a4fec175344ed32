"""The shell's exit codes. Scripts depend on them: pinned by a test, listed in docs/errors.md."""

from __future__ import annotations

from enum import IntEnum

from flashckpt.errors import DamagedError, RunError, UsageError


class ExitCode(IntEnum):
    WELL = 0
    DAMAGED = 1
    USAGE = 2
    UNUSABLE_RUN = 3
    FAILED = 4
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
