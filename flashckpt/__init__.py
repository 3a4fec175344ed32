"""flashckpt: checkpoints that cost a training loop nothing.

    for batch in flashckpt.loop(loader, "runs/gpt", model=model, optimizer=optimizer):
        ...                                   # the body does not change

Names that need torch are imported when they are first used: the keeper and the shell import this package
without it.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if not sys.platform.startswith("linux"):
    raise ImportError(
        f"flashckpt runs on Linux only (this is {sys.platform}): it needs memfd, O_DIRECT, fcntl."
    )

from flashckpt.errors import (
    BoundaryError,
    DamagedError,
    DivergedError,
    FlashckptError,
    FormatError,
    KeeperError,
    MismatchError,
    NoSuchStepError,
    OptionError,
    OutOfSpaceError,
    PersistError,
    RunError,
    RunHeldError,
    StateError,
    SupersededError,
    UnusableRunError,
    UsageError,
)
from flashckpt.options import Keep, Options

if TYPE_CHECKING:
    from flashckpt.checkpointer.attach import attach, loop
    from flashckpt.checkpointer.run import Checkpointer
    from flashckpt.checkpointer.run_state import Resumed
    from flashckpt.commit.verification import Report
    from flashckpt.runs import branch, load, steps, verify

__version__ = "0.1.0"

__all__ = [
    "__version__", "loop", "attach", "Checkpointer", "Resumed", "load", "steps", "branch", "verify", "Report",
    "Keep", "Options", "FlashckptError", "UsageError", "OptionError", "StateError", "BoundaryError",
    "MismatchError", "RunError", "RunHeldError", "SupersededError", "FormatError", "NoSuchStepError",
    "UnusableRunError", "DivergedError", "DamagedError", "OutOfSpaceError", "KeeperError", "PersistError",
]  # fmt: skip

_PLACES = {
    "loop": "checkpointer.attach",
    "attach": "checkpointer.attach",
    "Checkpointer": "checkpointer.run",
    "Resumed": "checkpointer.run_state",
    "Report": "commit.verification",
    **dict.fromkeys(("load", "steps", "branch", "verify"), "runs"),
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
