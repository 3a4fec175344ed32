"""torch.distributed.checkpoint (DCP) without pickle.

    import flashckpt.dcp as dcp

    dcp.save({"model": model, "optim": optim}, checkpoint_id="runs/gpt")
    dcp.load({"model": model, "optim": optim}, checkpoint_id="runs/gpt")

`save`, `async_save` and `load` take DCP's arguments and store each save as a step of a run. `Writer`,
`Reader`, `SavePlanner`, `LoadPlanner` and `Stager` are for frameworks that call DCP themselves. See
docs/dcp.md.
"""

from __future__ import annotations

from flashckpt.dcp.functions import async_save, close, load, save
from flashckpt.dcp.planners import LoadPlanner, SavePlanner, Stager
from flashckpt.dcp.reader import Reader
from flashckpt.dcp.writer import Writer

__all__ = [
    "LoadPlanner", "Reader", "SavePlanner", "Stager", "Writer", "async_save", "close", "load", "save",
]  # fmt: skip
