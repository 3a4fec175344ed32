"""What one process of this benchmark is asked to do: a trainer, and the way in which it saves."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class TrainerJob:
    """state_bytes: of parameters and AdamW's state, fp32. save_every: steps from one checkpoint on disk to
    the next, of the trainer's own and of flashckpt's. folder: where both put them. threads: of torch."""

    framework: str
    variant: str
    folder: str
    state_bytes: int
    layers: int
    batch: int
    save_every: int
    threads: int
    device: str

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> TrainerJob:
        fields: dict[str, Any] = json.loads(text)
        return cls(**fields)

    @property
    def flashckpt_options(self) -> dict[str, Any]:
        """What `train` or `Checkpoint` is given."""
        every: Any = 1 if self.variant == "every step" else "auto"
        return {"every": every, "persist_every": self.save_every}
