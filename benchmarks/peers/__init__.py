"""One adapter for each way of checkpointing that is compared. Imported by name, in the process that runs
it: a library that cannot be imported must not stop the others.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it imports torch, which whoever only asks for names may not have
    from benchmarks.peers.base import Peer

PEERS = {
    "flashckpt": ("flashckpt_run:ToDisk", "flashckpt, to disk"),
    "flashckpt_memory": ("flashckpt_run:ToMemory", "flashckpt, to memory"),
    "torch_save": ("torch_save:TorchSave", "torch.save + fsync"),
    "safetensors": ("safetensors_file:SafetensorsFile", "safetensors save_file"),
    "dcp_save": ("dcp:Save", "DCP save, 4 threads"),
    "dcp_async": ("dcp:AsyncSave", "DCP async_save, default"),
    "dcp_async_kept": ("dcp:AsyncSaveKeptStager", "DCP async_save, kept stager, 4 threads"),
    "torch_checkpointing": ("torch_checkpointing_manager:Manager", "torch_checkpointing, buffered writes"),
    "dlrover": ("dlrover_flash:ToDisk", "DLRover, to disk"),
    "dlrover_memory": ("dlrover_flash:ToMemory", "DLRover, to memory"),
    "nvrx": ("nvrx_async:AsyncCheckpoint", "NVRx TorchAsyncCheckpoint"),
    "torchsnapshot": ("torchsnapshot_take:AsyncTake", "torchsnapshot async_take"),
}
"""Where the adapter is, and its title in the table."""


def create(name: str) -> Peer:
    module, _, attribute = PEERS[name][0].partition(":")
    peer: Peer = getattr(importlib.import_module(f"benchmarks.peers.{module}"), attribute)()
    return peer
