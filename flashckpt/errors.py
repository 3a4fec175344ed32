"""Every error that this library raises, grouped by what a handler does next.

    FlashckptError                   carries step, rank and path if they are known
    ├── UsageError                   change the program
    │   ├── OptionError              an option or a name is invalid
    │   ├── StateError               a part of the state cannot be saved exactly
    │   └── BoundaryError            the program drives the loop so that its boundaries are not consistent
    ├── MismatchError                the model differs from the saved one; nothing was changed
    ├── RunError                     the run's folder cannot be used as asked
    │   ├── RunHeldError             another job holds the run
    │   ├── SupersededError          a newer attempt has begun: this attempt must end
    │   ├── FormatError              a newer version of this library wrote the run
    │   ├── NoSuchStepError          the step does not exist or is not committed
    │   └── UnusableRunError         the run has steps, but none can be used
    ├── DivergedError                replicas of a tensor differ between ranks
    ├── DamagedError                 bytes differ from those that were written
    ├── OutOfSpaceError              too little memory or disk; carries the bytes needed and available
    ├── KeeperError                  the keeper cannot be started or does not answer
    └── PersistError                 a snapshot could not be persisted; raised where the user waits

Each message states what happened, what it means for the data, and what to do.
"""

from __future__ import annotations

import os

from flashckpt.printable import escaped


class FlashckptError(Exception):
    """Root of all errors. `step`, `rank` and `path` are None if unknown. Escapes control characters in the
    message, which may quote an untrusted checkpoint."""

    def __init__(
        self,
        message: str,
        *,
        step: int | None = None,
        rank: int | None = None,
        path: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(escaped(message))
        self.step = step
        self.rank = rank
        self.path = None if path is None else os.fspath(path)


class UsageError(FlashckptError):
    """The program asks for something impossible; nothing was changed."""


class OptionError(UsageError):
    """An option has an invalid value, or a keyword is neither an option nor a stateful object."""


class StateError(UsageError):
    """A part of the state cannot be saved exactly. `location` is its path in the state."""

    def __init__(self, message: str, *, location: str = "", step: int | None = None) -> None:
        super().__init__(message, step=step)
        self.location = location


class BoundaryError(UsageError):
    """The program drives the loop so that its boundaries would not be consistent cuts."""


class MismatchError(FlashckptError):
    """The live state does not fit the checkpoint. The live state was not changed.

    `differences` has one row per difference: (name, value in the checkpoint, value in the live state).
    """

    def __init__(
        self,
        message: str,
        *,
        differences: tuple[tuple[str, str, str], ...] = (),
        step: int | None = None,
        path: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(message, step=step, path=path)
        self.differences = differences


class RunError(FlashckptError):
    """The run's folder cannot be used as asked."""


class RunHeldError(RunError):
    """Another job holds the run, on this node or on another."""


class SupersededError(RunError):
    """A newer attempt has begun; the run ignores what this attempt writes from now on."""


class FormatError(RunError):
    """The run was written in a newer format than this version reads. Nothing was changed."""


class NoSuchStepError(RunError):
    """The requested step does not exist or is not committed."""


class UnusableRunError(RunError):
    """The run has steps, but none can be used. It is never treated as a fresh run."""


class DivergedError(FlashckptError):
    """Replicas of a tensor differ between ranks; the step is not committed. `leaves`: names of the tensors
    that differ. `ranks`: the ranks that differ from the majority."""

    def __init__(
        self,
        message: str,
        *,
        leaves: tuple[str, ...] = (),
        ranks: tuple[int, ...] = (),
        step: int | None = None,
    ) -> None:
        super().__init__(message, step=step)
        self.leaves = leaves
        self.ranks = ranks


class DamagedError(FlashckptError):
    """Bytes differ from those that were written: flipped, truncated, exchanged, or of another writer."""


class OutOfSpaceError(FlashckptError):
    """Too little memory or disk space. `needed` and `available` are in bytes."""

    def __init__(
        self, message: str, *, needed: int = 0, available: int = 0, path: str | os.PathLike[str] | None = None
    ) -> None:
        super().__init__(message, path=path)
        self.needed = needed
        self.available = available


class KeeperError(FlashckptError):
    """The keeper cannot be started or found, or does not answer. Training continues unaffected."""


class PersistError(FlashckptError):
    """A snapshot could not be persisted. Raised by `wait()` and `close()`, never by the loop."""
