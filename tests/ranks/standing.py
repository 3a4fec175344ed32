"""A rank that meets the others, says so, and stands still or ends with the status that it is given."""

from __future__ import annotations

import os
import signal
import sys

import torch.distributed as dist

dist.init_process_group("gloo")
ranks = [None] * dist.get_world_size()
dist.all_gather_object(ranks, (os.environ["FLASHCKPT_RUNTIME"], os.environ["LOCAL_RANK"]))
print(f"met {ranks}", flush=True)
print("all here", flush=True)
if sys.argv[1] == "stand":
    signal.pause()
dist.destroy_process_group()
sys.exit(int(sys.argv[1]))
