"""flashckpt inside Lightning's Trainer. `import lightning` in this package is theirs.

Trainer(callbacks=[flashckpt.lightning.Checkpoint("runs/gpt")])
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["Checkpoint"]

if TYPE_CHECKING:
    from flashckpt.lightning.callback import Checkpoint as Checkpoint


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from flashckpt.lightning import callback

    return getattr(callback, name)


def __dir__() -> list[str]:
    return __all__
