"""Copies of a state_dict for an asynchronous save: made in the call, so that a failure is raised there.

torch reports a staging future that failed early as done; nothing here returns a future.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.staging import AsyncStager

from flashckpt.dcp.planners import check_tensor
from flashckpt.dcp.slices import copy_attributes, has_slices, sliced
from flashckpt.format.typed import checked


class Stager(AsyncStager):
    """For `torch.distributed.checkpoint.async_save(async_stager=…)`; a Writer is one already. `stage`
    returns a copy in host memory that shares nothing with the state_dict. Raises StateError for what cannot
    be saved."""

    _synchronize_after_execute = False

    def stage(self, state_dict: Any, **_: Any) -> Any:
        return {key: _staged(value, str(key)) for key, value in state_dict.items()}

    def synchronize_staging(self) -> None:
        """Nothing is under way when `stage` returns."""

    def close(self) -> None:
        """There is nothing to let go of."""


def _staged(value: Any, name: str) -> Any:
    if isinstance(value, Tensor):
        check_tensor(sliced(value, name), name)
        if hasattr(value, "local_shards"):  # a ShardedTensor: its `to` copies only where the device changes
            return copy.deepcopy(value).cpu()
        copied = value.detach().to("cpu", copy=True)
        return copy_attributes(value, copied) if has_slices(value) else copied
    if isinstance(value, Mapping):
        return {key: _staged(item, f"{name}.{key}") for key, item in value.items()}
    if type(value) is list:
        return [_staged(item, f"{name}.{index}") for index, item in enumerate(value)]
    return checked(value, name).value
