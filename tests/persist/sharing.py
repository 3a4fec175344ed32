"""Ranks of one job in this process that capture live states which they hold alike, but for a few leaves."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from flashckpt import _native
from flashckpt.capture import Capture
from flashckpt.capture.plan import Sharing
from flashckpt.capture.schedule import Pace
from flashckpt.format.names import AttemptName
from flashckpt.format.typed import encode_json
from flashckpt.memory.held_regions import Regions
from flashckpt.memory.slot import Sealed, Slot
from flashckpt.options import Options
from flashckpt.restore.memory_tier import Held
from flashckpt.state.leaves import Walk
from flashckpt.state.tree import Tree
from tests.persist.node import Rank


class Net(nn.Module):
    """What data-parallel training holds alike, a tied weight and one in another order among it; and a buffer
    that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 48)
        self.second = nn.Linear(48, 64).to(torch.bfloat16)
        self.tied = nn.Linear(64, 48, bias=False)
        self.tied.weight = self.first.weight
        self.conv = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(48)


class SharedTree(Tree):
    """A tree that declares what data-parallel training does: parameters and their optimizer's state."""

    ranks: tuple[int, ...] = ()

    def walk(self, used_up: Callable[..., bool]) -> Walk:
        walk = super().walk(used_up)
        for live in walk.leaves:
            live.replicas = self.ranks if live.kind in ("parameter", "optimizer") else ()
        return walk


class SharingRank(Rank):
    """A rank whose slots are filled by a capture. All have the same weights and see the same gradients."""

    def __init__(
        self, regions: Regions, rank: int, attempt: AttemptName, *, world: int, is_divided: bool = True,
        node: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        torch.manual_seed(3)
        self.rank, self.attempt, self.net = rank, attempt, Net()
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        self.tree = SharedTree({"model": self.net, "optimizer": self.optimizer})
        self.tree.ranks = tuple(range(world))
        self.sharing = Sharing(rank, is_divided=is_divided, node=node, least_bytes=1)
        self.sealer = _native.Sealer()
        self.train(0)
        self.capture = Capture(
            self.tree, None, self.sealer, Options(), schedule=Pace(None), optimizers=self.tree.optimizers,
            attempt=(attempt.number, int(attempt.nonce, 16)), sharing=self.sharing,
        )  # fmt: skip
        self.slots = list[Slot]()
        self.have_slots(regions, range(3))

    def have_slots(self, regions: Regions, indexes: Sequence[int]) -> None:
        """Slots for the state as it is; those before go."""
        size = self.capture.memory_needed(ordered=True)
        assert size is not None
        before = self.slots
        self.make_slots(regions, self.rank, indexes, size)
        self.capture.set_slots(self.ring, self.owners)
        for slot in before:
            slot.close()

    def held(self, others: "Iterable[SharingRank]" = ()) -> Held:
        """What is newest in its slots, and that of other ranks, as a resume has them."""
        slot, sealed = self.newest()
        slots = {each.rank: [each.newest()[0]] for each in others}
        return Held(slot, self.owners[slot.name], sealed, others=slots)

    def newest(self) -> tuple[Slot, Sealed]:
        found = self.ring.newest_sealed()
        assert found is not None
        return found

    def train(self, step: int) -> None:
        torch.manual_seed(step)
        for parameter in self.net.parameters():
            parameter.grad = torch.randn(parameter.shape).to(parameter.dtype)
        self.optimizer.step()
        self.optimizer.zero_grad()
        running = self.net.norm.running_mean
        running.fill_(step + self.rank / 10)

    def snapshot(self, step: int, *, persist: bool = False) -> tuple[Slot, int]:
        """One more step of training, captured and sealed."""
        self.train(step)
        return self.again(step, persist=persist)

    def again(self, step: int, *, persist: bool = False) -> tuple[Slot, int]:
        """The state as it is, captured and sealed."""
        self.capture.boundary_index = step if self.boundary is None else self.boundary
        outcome = self.capture.boundary(step, self._values, due=True, ordered=True)
        assert outcome.captured, outcome
        assert self.sealer.drain(240)
        slot, sealed = self.newest()
        if persist:
            slot.request_persist(sealed.generation)
        return slot, sealed.generation

    def _values(self) -> bytes:
        return encode_json({"state": self.tree.values(self.capture.hooks.used_up)})

    def live(self) -> dict[str, bytes]:
        """Every leaf's bytes as they are now, row by row."""
        walk = self.tree.walk(self.capture.hooks.used_up)
        return {live.name: bytes_of(live.tensor) for live in walk.leaves}

    def close(self) -> None:
        self.capture.close()
        super().close()


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
