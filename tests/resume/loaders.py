"""Loaders of the kinds that people write, each as a training recipe that records every batch to the bit."""

import contextlib
import copy
import functools
import hashlib
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

import flashckpt
from tests.resume.recipes import Hold, Noisy, Record

EPOCHS, BATCHES = 3, 5
ITEMS = 4 * BATCHES


def numbers(at: int) -> torch.Tensor:
    """Item `at`, with noise from the generators of whichever process makes it."""
    noise = torch.rand(2) + random.random() + float(np.random.rand())
    return torch.cat([torch.tensor([float(at), float(at % 7)]), noise])


class Stream(IterableDataset[Any]):
    """Keeps no state; its items do not depend on random numbers, since it is drawn again."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        start, step = (info.id, info.num_workers) if info else (0, 1)
        for at in range(start, ITEMS, step):
            yield torch.tensor([at, 1.0])


class Sticky(IterableDataset[Any]):
    """Every `iter()` begins at the state that was loaded last, as in Hugging Face's data sets."""

    def __init__(self) -> None:
        self._starting_state_dict: dict[str, Any] | None = None
        self.state = {"shard": 0, "row": 0}

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        shards = range(4)[info.id :: info.num_workers] if info else range(4)
        self.state = dict(self._starting_state_dict or {"shard": 0, "row": 0})
        while self.state["shard"] < len(shards):
            while self.state["row"] < ITEMS // 4:
                self.state["row"] += 1
                item = torch.tensor([shards[self.state["shard"]], float(self.state["row"])])
                yield item if info else torch.cat([item, torch.rand(1)])
            self.state = {"shard": self.state["shard"] + 1, "row": 0}

    def state_dict(self) -> dict[str, Any]:
        return copy.deepcopy(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._starting_state_dict = state


class Shards:
    """As WebDataset does: shards in an order of the epoch, a buffer that shuffles, a state of its own."""

    def __init__(self) -> None:
        self.epoch, self.at = np.uint32(0), 0
        self.random = random.Random(5)

    def __iter__(self) -> Iterator[torch.Tensor]:
        order = np.random.default_rng(int(self.epoch)).permutation(BATCHES)
        while self.at < BATCHES:
            self.at += 1
            yield torch.tensor([float(order[self.at - 1]), self.random.random(), float(torch.rand(()))])
        self.epoch, self.at = np.uint32(self.epoch + 1), 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "at": self.at, "random": self.random.getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert type(state["epoch"]) is np.uint32
        self.epoch, self.at = state["epoch"], state["at"]
        self.random.setstate(state["random"])


class Buffered:
    """Gives the same memory again and again."""

    def __init__(self) -> None:
        self.buffer = torch.zeros(3)

    def __iter__(self) -> Iterator[torch.Tensor]:
        for at in range(BATCHES):
            self.buffer.fill_(at)
            yield self.buffer[: 1 + at % 3]


class Remembering(Dataset[Any]):
    """A data set with a generator and a state of its own, which a DataLoader does not ask for."""

    def __init__(self) -> None:
        self.own = torch.Generator().manual_seed(3)

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, at: int) -> torch.Tensor:
        return torch.cat([numbers(at), torch.rand(1, generator=self.own)])


class Shuffled(Sampler[int]):
    def __init__(self) -> None:
        self.random = np.random.default_rng(4)

    def __iter__(self) -> Iterator[int]:
        return iter(self.random.permutation(ITEMS).tolist())

    def __len__(self) -> int:
        return ITEMS


class ByEpoch(Shuffled):
    """Told which epoch it is, as torchdata's nodes and distributed samplers are."""

    def set_epoch(self, epoch: int) -> None:
        self.random = np.random.default_rng(epoch)


def torchdata(data: Any, workers: int = 0, **options: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(data, 4, num_workers=workers, **options)


def nodes() -> Any:
    from torchdata import nodes as n

    node = n.Batcher(n.SamplerWrapper(ByEpoch()), batch_size=4)
    return n.Loader(n.Mapper(node, torch.tensor))


def hugging_face() -> Any:
    from datasets import Dataset as HuggingFace  # type: ignore[import-not-found,unused-ignore]

    rows = {"x": [float(at) for at in range(ITEMS)]}
    return HuggingFace.from_dict(rows).to_iterable_dataset(num_shards=4)


def generated() -> Iterator[torch.Tensor]:
    for at in range(EPOCHS * BATCHES):
        yield torch.tensor([float(at)])


def plain(workers: int, **options: Any) -> Any:
    return DataLoader(Noisy(ITEMS), **{"batch_size": 4, **options}, num_workers=workers)


WEIGHTS = [1.0 + at for at in range(ITEMS)]
# Each way to put a loader back.
LOADERS: dict[str, Callable[[], Any]] = {
    "own sampler": lambda: plain(0, sampler=Shuffled()),
    "two persistent workers": lambda: plain(2, shuffle=True, persistent_workers=True),
    "weighted, two workers": lambda: plain(2, sampler=WeightedRandomSampler(WEIGHTS, ITEMS)),
    "own generator": lambda: plain(0, shuffle=True, generator=torch.Generator().manual_seed(9)),
    "batch sampler": lambda: DataLoader(Noisy(ITEMS), batch_sampler=BatchSampler(Shuffled(), 4, False)),
    "data with a generator": lambda: DataLoader(Remembering(), 4, shuffle=True),
    "stream, two workers": lambda: DataLoader(Stream(), 2, num_workers=2),
    "generator": generated,
    "shards": Shards,
    "one buffer": Buffered,
    "sticky": lambda: DataLoader(Sticky(), 4),
    "sticky itself": lambda: Sticky(),
    "torchdata": lambda: torchdata(Noisy(ITEMS), shuffle=True),
    "torchdata, workers": lambda: torchdata(TensorDataset(torch.arange(float(ITEMS))), 2, shuffle=True),
    "torchdata, sticky": lambda: torchdata(Sticky()),
    "torchdata nodes": nodes,
    "hugging face": lambda: DataLoader(hugging_face(), 4),
}  # fmt: skip


def place(epoch: int, position: int) -> int:
    """Where a trainer may be held: the epoch in hundreds, and the position in it."""
    return 100 * (epoch + position // BATCHES) + position % BATCHES


def digest(batch: Any) -> str:
    if isinstance(batch, torch.Tensor):
        return hashlib.blake2b(batch.contiguous().numpy().tobytes(), digest_size=6).hexdigest()
    if isinstance(batch, dict):
        return ",".join(f"{key}={digest(item)}" for key, item in batch.items())
    if isinstance(batch, list | tuple):
        return ",".join(map(digest, batch))
    return repr(batch)


def train(make: Callable[[], Any], record: Record, hold: Hold, path: str, options: dict[str, Any]) -> None:
    """Every epoch of the loader; what is recorded is each batch and the random numbers after it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of workers beyond the cores, torchdata of itself
        net = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        loader = make()
        whole = {"epochs": EPOCHS} if make is not generated else {"epochs": 1}
        with contextlib.closing(flashckpt.attach(path, model=net, optimizer=optimizer, **options)) as run:
            for epoch in run.epochs(whole["epochs"]):
                for position, batch in run.enumerate(loader):
                    hold(place(epoch, position))
                    net(torch.rand(2, 1)).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    record(run, [epoch, position, digest(batch), random.random(), float(torch.rand(()))])


RECIPES = {name: functools.partial(train, make) for name, make in LOADERS.items()}
