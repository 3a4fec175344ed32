"""The user's loader, with a position that can be saved at any boundary and taken up again exactly."""

from flashckpt.state.loader.base import Source, reference_to, set_epoch
from flashckpt.state.loader.sources import Sources, check_loader, source_of

__all__ = [
    "Source",
    "Sources",
    "check_loader",
    "reference_to",
    "set_epoch",
    "source_of",
]
