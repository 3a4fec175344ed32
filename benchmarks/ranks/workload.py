"""The training loop of a job: the GPT of `benchmarks.workload` under FSDP2 or DDP, one process a rank.

Checksums of its state do not depend on how it is divided: what 4 ranks have saved can be compared with what 2
have loaded.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.parallel import DistributedDataParallel

from benchmarks.settings import Settings
from benchmarks.workload import Gpt, Workload, checksum


class JobWorkload(Workload):
    def __init__(self, settings: Settings, kind: str) -> None:
        self._kind = kind
        super().__init__(settings)

    def _placed(self, net: Gpt) -> nn.Module:
        if self._kind == "ddp":
            return DistributedDataParallel(net)
        mesh = init_device_mesh(self.device.type, (dist.get_world_size(),))
        for block in net.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
        return net

    @property
    def net(self) -> nn.Module:
        """The model under the names that it was written with."""
        return self.model.module if isinstance(self.model, DistributedDataParallel) else self.model

    def leaves(self) -> dict[str, Tensor]:
        found = {f"model.{name}": tensor for name, tensor in self.net.state_dict().items()}
        names: dict[Tensor, str] = {leaf: name for name, leaf in self.net.named_parameters()}
        for parameter, state in self.optimizer.state.items():
            for key, value in state.items():
                found[f"optimizer.{names[parameter]}.{key}"] = value
        return found

    def spoil(self) -> None:
        """Other values everywhere, so that a load that does nothing is seen."""
        with torch.no_grad():
            for leaf in chain(
                self.net.parameters(), *(each.values() for each in self.optimizer.state.values())
            ):
                _local(leaf).fill_(7.0)

    def held_bytes(self) -> int:
        """Of this rank."""
        return sum(_local(leaf).numel() * leaf.element_size() for leaf in self.leaves().values())

    def num_bytes(self) -> int:
        """Of the job: replicas once."""
        return sum(leaf.numel() * leaf.element_size() for leaf in self.leaves().values())

    def fingerprint(self) -> dict[str, int]:
        """A checksum of every leaf, the same on all ranks. Raises where replicas differ."""
        leaves = self.leaves()
        own = torch.tensor([checksum(_local(leaf), _first_element(leaf)) for leaf in leaves.values()])
        all_of = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(all_of, own)
        found: dict[str, int] = {}
        for (name, leaf), *parts in zip(leaves.items(), *all_of, strict=True):
            if isinstance(leaf, DTensor):
                found[name] = int(torch.stack(parts).sum())
            elif all(part == parts[0] for part in parts):
                found[name] = int(parts[0])
            else:
                raise RuntimeError(f"{name} differs between ranks")
        return found


def _local(leaf: Tensor) -> Tensor:
    return leaf.to_local() if isinstance(leaf, DTensor) else leaf


def _first_element(leaf: Tensor) -> int:
    """Where this rank's rows begin in the whole leaf, counted in elements."""
    if not isinstance(leaf, DTensor):
        return 0
    placements: Any = leaf.placements
    _, offset = compute_local_shape_and_global_offset(leaf.shape, leaf.device_mesh, placements)
    return int(offset[0] * leaf.shape[1:].numel())
