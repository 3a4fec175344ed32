"""One adapter for each way of checkpointing that is compared. Imported by name, in the process that runs
it: a library that cannot be imported must not stop the others.
"""

from __future__ import annotations

import importlib

from benchmarks.peers.base import Peer

PLACES = {
    "flashckpt": "flashckpt_run:ToDisk",
    "flashckpt_memory": "flashckpt_run:ToMemory",
    "torch_save": "torch_save:TorchSave",
    "safetensors": "safetensors_file:SafetensorsFile",
    "dcp_save": "dcp:Save",
    "dcp_async": "dcp:AsyncSave",
    "dcp_async_kept": "dcp:AsyncSaveKeptStager",
    "torch_checkpointing": "torch_checkpointing_manager:Manager",
    "dlrover": "dlrover_flash:ToDisk",
    "dlrover_memory": "dlrover_flash:ToMemory",
    "nvrx": "nvrx_async:AsyncCheckpoint",
    "torchsnapshot": "torchsnapshot_take:AsyncTake",
}


def create(name: str) -> Peer:
    module, _, attribute = PLACES[name].partition(":")
    peer: Peer = getattr(importlib.import_module(f"benchmarks.peers.{module}"), attribute)()
    return peer
