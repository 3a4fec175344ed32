"""What people touch: `attach`, `loop` and the Checkpointer, and when a boundary is."""

from flashckpt.checkpointer.attaching import attach as attach
from flashckpt.checkpointer.facade import Checkpointer as Checkpointer
from flashckpt.checkpointer.facade import Resumed as Resumed
from flashckpt.checkpointer.looping import loop as loop
