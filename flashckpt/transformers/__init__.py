"""flashckpt inside the trainers of transformers and trl. `import transformers` here means their package.

flashckpt.transformers.train(trainer, "runs/gpt")           # instead of trainer.train()
flashckpt.transformers.export("runs/gpt", "gpt-folder")     # for from_pretrained
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# Module names differ from the functions' names: importing a submodule binds its name in the package.
_PLACES = {"train": "training", "export": "exporting", "assets_of": "exporting", "keep_config": "exporting"}

__all__ = sorted(_PLACES)

if TYPE_CHECKING:
    from flashckpt.transformers.exporting import assets_of as assets_of
    from flashckpt.transformers.exporting import export as export
    from flashckpt.transformers.exporting import keep_config as keep_config
    from flashckpt.transformers.training import train as train


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_PLACES[name]}")
    return getattr(module, name)


def __dir__() -> list[str]:
    return __all__
