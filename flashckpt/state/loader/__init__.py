"""The user's loader, with a position that can be saved at any boundary and taken up again exactly."""

from flashckpt.state.loader.base import OnReplay, Source
from flashckpt.state.loader.choice import source_of

__all__ = ["OnReplay", "Source", "source_of"]
