"""flashckpt: checkpoints that cost a training loop nothing.

    for batch in flashckpt.loop(loader, "runs/gpt", model=model, optimizer=optimizer):
        ...                                   # the body does not change

Names are imported when they are first used: the keeper and the shell import this package without torch.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if not sys.platform.startswith("linux"):
    raise ImportError(
        f"flashckpt runs on Linux only (this is {sys.platform}): it needs memfd, O_DIRECT, fcntl."
    )

__version__ = "0.1.0"

_PLACES = {
    "loop": "checkpointer.attach",
    "attach": "checkpointer.attach",
    "Checkpointer": "checkpointer.run",
    "Resumed": "checkpointer.run_state",
    "load": "runs",
    "steps": "runs",
    "branch": "runs",
    "verify": "runs",
    "Report": "commit.verification",
    "Keep": "options",
    "Options": "options",
    **dict.fromkeys(
        (
            "FlashckptError", "UsageError", "OptionError", "StateError", "BoundaryError", "MismatchError",
            "RunError", "RunHeldError", "SupersededError", "FormatError", "NoSuchStepError",
            "UnusableRunError", "DivergedError", "DamagedError", "OutOfSpaceError", "KeeperError",
            "PersistError",
        ),
        "errors",
    ),
}  # fmt: skip

__all__ = sorted([*_PLACES, "__version__"])

if TYPE_CHECKING:
    from flashckpt.checkpointer.attach import attach as attach
    from flashckpt.checkpointer.attach import loop as loop
    from flashckpt.checkpointer.run import Checkpointer as Checkpointer
    from flashckpt.checkpointer.run_state import Resumed as Resumed
    from flashckpt.commit.verification import Report as Report
    from flashckpt.errors import BoundaryError as BoundaryError
    from flashckpt.errors import DamagedError as DamagedError
    from flashckpt.errors import DivergedError as DivergedError
    from flashckpt.errors import FlashckptError as FlashckptError
    from flashckpt.errors import FormatError as FormatError
    from flashckpt.errors import KeeperError as KeeperError
    from flashckpt.errors import MismatchError as MismatchError
    from flashckpt.errors import NoSuchStepError as NoSuchStepError
    from flashckpt.errors import OptionError as OptionError
    from flashckpt.errors import OutOfSpaceError as OutOfSpaceError
    from flashckpt.errors import PersistError as PersistError
    from flashckpt.errors import RunError as RunError
    from flashckpt.errors import RunHeldError as RunHeldError
    from flashckpt.errors import StateError as StateError
    from flashckpt.errors import SupersededError as SupersededError
    from flashckpt.errors import UnusableRunError as UnusableRunError
    from flashckpt.errors import UsageError as UsageError
    from flashckpt.options import Keep as Keep
    from flashckpt.options import Options as Options
    from flashckpt.runs import branch as branch
    from flashckpt.runs import load as load
    from flashckpt.runs import steps as steps
    from flashckpt.runs import verify as verify


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
