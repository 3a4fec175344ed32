"""Every error this library raises, grouped by what its handler would do next.

    FlashckptError                   carries step, rank and path where they are known
    ├── UsageError                   change the program
    │   ├── OptionError              an option or a name that cannot be
    │   ├── StateError               a part of the state that cannot be saved exactly
    │   └── BoundaryError            the loop is driven in a way that makes its boundaries a lie
    ├── MismatchError                the model is not the one that was saved; nothing was changed
    ├── RunError                     the run's folder cannot be used as asked
    │   ├── RunHeldError             another job holds the run
    │   ├── SupersededError          a newer attempt has claimed the run: this one must end
    │   ├── FormatError              written by a newer version of this library
    │   ├── NoSuchStepError          no such step, or none that is committed
    │   └── UnusableRunError         the run has steps, and none of them can be used
    ├── DivergedError                what ranks hold alike by declaration is not alike
    ├── DamagedError                 bytes are not those that were written
    ├── OutOfRoomError               too little memory or disk: what was needed, what there is
    ├── KeeperError                  the keeper cannot be started or asked
    └── PersistError                 what was to be persisted could not be; raised where the user waits

Messages say what happened, what it means for the data, and what to do.
"""

from __future__ import annotations

import os

from flashckpt.printable import escaped


class FlashckptError(Exception):
    """Root of all errors. `step`, `rank` and `path` are None where they are not known. Control characters in
    a message, which may quote a checkpoint from elsewhere, are escaped."""

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
    """The program asks for something that cannot be; nothing was changed."""


class OptionError(UsageError):
    """An option has a value that cannot be, or a keyword is neither an option nor stateful."""


class StateError(UsageError):
    """A part of the state cannot be saved exactly. `location` is its path in the state."""

    def __init__(self, message: str, *, location: str = "", step: int | None = None) -> None:
        super().__init__(message, step=step)
        self.location = location


class BoundaryError(UsageError):
    """The loop is driven in a way in which its boundaries would not be consistent cuts."""


class MismatchError(FlashckptError):
    """The live state does not fit the checkpoint. The live state was not changed.

    `differences` holds one row (name, in the checkpoint, in the live state) for each thing that differs.
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
    """A newer attempt has claimed the run; what this attempt still does is not part of it."""


class FormatError(RunError):
    """The run was written in a newer format than this version reads. Nothing was changed."""


class NoSuchStepError(RunError):
    """The step that was asked for is not there, or is not committed."""


class UnusableRunError(RunError):
    """The run has steps and none can be used. It is never taken for a fresh run."""


class DivergedError(FlashckptError):
    """What ranks hold alike by declaration is not alike; the step is not committed. `leaves` are the names of
    what differs, `ranks` those that hold something else than the most do."""

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
    """Bytes are not those that were written: flipped, cut short, exchanged, or not ours."""


class OutOfRoomError(FlashckptError):
    """Too little room. `needed` and `available` are in bytes."""

    def __init__(
        self,
        message: str,
        *,
        needed: int = 0,
        available: int = 0,
        path: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(message, path=path)
        self.needed = needed
        self.available = available


class KeeperError(FlashckptError):
    """The keeper cannot be started, found or asked. Training is not touched by it."""


class PersistError(FlashckptError):
    """What was to be persisted could not be. Raised by `wait()` and `close()`, never by the loop."""
