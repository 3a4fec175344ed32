"""The user's loader, with a position that can be saved at any boundary and taken up again exactly."""

from flashckpt.state.loader.base import OnReplay, Source
from flashckpt.state.loader.choice import check_loader, source_of
from flashckpt.state.loader.kept import Sources
from flashckpt.state.loader.replayed import ReplayLog

__all__ = ["OnReplay", "ReplayLog", "Source", "Sources", "check_loader", "source_of"]
