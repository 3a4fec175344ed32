"""Whether a collective of this process may have been aborted: what its process groups report.

ProcessGroupNCCL's watchdog records an error (`get_error`: a timeout, a failed communicator, an error of
another rank) before it aborts the communicators of that group. So while no group reports one, no watchdog has
aborted anything. To ask starts no collective and calls nothing of CUDA.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any


def group_failure() -> str:
    """Why a collective may have been aborted, in words; empty where no process group reports an error.

    A backend without `get_error` reports none: gloo, which raises its errors, and NCCL before torch 2.7."""
    distributed: Any = sys.modules.get("torch.distributed.distributed_c10d")
    world = getattr(distributed, "_world", None)
    return failure_of(list(getattr(world, "pg_map", ())))


def failure_of(groups: Iterable[Any]) -> str:
    """The same of these process groups."""
    for group in groups:
        for kind in getattr(group, "_device_types", ()):
            try:
                error = group._get_backend(kind).get_error()
            except (AttributeError, RuntimeError):
                continue
            if error.name != "SUCCESS":
                return (
                    f"a process group reports {error.name}, and its collectives may have been aborted with "
                    "half of their result. See the log of torch.distributed, and start all ranks again"
                )
    return ""
