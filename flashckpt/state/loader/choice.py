"""Which kind of source serves a loader. Looks and refuses; draws nothing and changes nothing."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from flashckpt.errors import BoundaryError, OptionError
from flashckpt.state.loader.base import OnReplay, Source
from flashckpt.state.loader.plain import PlainSource


def source_of(loader: Any, *, on_replay: OnReplay | None = None) -> Source:
    return PlainSource(loader)
