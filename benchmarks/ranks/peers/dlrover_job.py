"""DLRover on several ranks, without its launcher: the first rank of the node starts the saver. DDP's
checkpoint is rank 0's; its checkpointer for shards reads through the state dictionaries of FSDP1's wrapper.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch.distributed as dist
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer
from dlrover.trainer.torch.flash_checkpoint.engine import start_saver_process

from benchmarks.peers import dlrover_flash
from benchmarks.ranks.workload import JobWorkload
from benchmarks.workload import Workload


class ToDisk(dlrover_flash.ToDisk):
    def setup(self, workload: Workload, folder: Path, every: int) -> None:
        assert isinstance(workload, JobWorkload)
        if workload.net is workload.model:
            # FsdpShardCheckpointer ends with AttributeError: 'NoneType' … 'optim_state_dict_config'.
            raise NotImplementedError("its checkpointer for shards takes FSDP1's wrapper, not FSDP2")
        self.workload, self.folder = workload, folder
        if dist.get_rank() == 0:
            start_saver_process()
            time.sleep(dlrover_flash.SAVER_START_S)
        dist.barrier()
        os.environ["ROLE_NAME"] = "dlrover-trainer"
        self._checkpointer = DdpCheckpointer(str(folder), comm_backend="gloo")
