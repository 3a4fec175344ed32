"""Loaders of each kind, by name, and runs over them that record each batch, random number and loaded item.
Imported by the tests and by the new processes that resume."""

import hashlib
import os
import random
import warnings
from collections import namedtuple
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
)

from flashckpt.format.typed import check_roundtrip, decode_json, encode_json
from flashckpt.state import rng
from flashckpt.state.loader.sources import source_of

ITEMS = 22
Key = tuple[int, int | str]


class Items(Dataset[Any]):
    """Items made of their index and of all three generators; each load writes a byte to a file."""

    def __init__(self, loads: str, count: int = ITEMS) -> None:
        self.loads = loads
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        with open(self.loads, "ab") as file:
            file.write(b".")
        return index, random.random(), float(np.random.randn()), torch.randn(1).item()


class Owning(Items):
    """With its own generators."""

    def __init__(self, loads: str) -> None:
        super().__init__(loads)
        self.own = [random.Random(1), np.random.default_rng(2), torch.Generator().manual_seed(3)]

    def __getitem__(self, index: int) -> Any:
        python, numpy, own = self.own
        drawn = torch.rand(1, generator=own).item()
        return super().__getitem__(index) + (python.random(), float(numpy.random()), drawn)


class StatefulStream(IterableDataset[Any]):
    """Continues from its state once, and then starts again."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < 18:
            self.at += 1
            yield self.at, random.random()
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Noise(nn.Module):
    """A transform, as in torchvision: a module with a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = np.random.default_rng(11)

    def forward(self, item: Any) -> Any:
        return *item, float(self.numbers.random())


class Transformed(Items):
    """With generators in a dictionary of modules, and in a partial function, in a list of transforms."""

    def __init__(self, loads: str) -> None:
        super().__init__(loads)
        self.transforms = [{"noise": nn.Sequential(Noise())}, partial(with_number, numbers=random.Random(12))]

    def __getitem__(self, index: int) -> Any:
        noise, number = self.transforms
        return number(noise["noise"](super().__getitem__(index)))  # type: ignore[index, operator]


def with_number(item: Any, numbers: random.Random) -> Any:
    return *item, numbers.random()


class Eager(Sampler[int]):
    """Draws in `iter()` itself, from the global generators (behind a BatchSampler: at the first index)."""

    def __init__(self, count: int = ITEMS) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self.count).tolist()
        random.shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return self.count


class EagerBatches(Sampler[list[int]]):
    """Batches of uneven size, drawn in `iter()` from its own generators; without a length."""

    def __init__(self) -> None:
        self.sizes = random.Random(4)
        self.order = np.random.default_rng(5)

    def __iter__(self) -> Iterator[list[int]]:
        order = self.order.permutation(ITEMS).tolist()
        cuts = sorted(self.sizes.sample(range(1, ITEMS), 5))
        return iter([order[a:b] for a, b in zip([0, *cuts], [*cuts, ITEMS], strict=True)])


class LazyOwn(Sampler[int]):
    """Draws from its own generator for each index."""

    def __init__(self) -> None:
        self.random = random.Random(6)

    def __iter__(self) -> Iterator[int]:
        for _ in range(ITEMS):
            yield self.random.randrange(ITEMS)

    def __len__(self) -> int:
        return ITEMS


class LazyGlobal(LazyOwn):
    """Draws from the global generator for each index: cannot be exact."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(ITEMS):
            yield random.randrange(ITEMS)


Pair = namedtuple("Pair", ["index", "numbers"])


def collate(samples: list[Any]) -> Pair:
    noise = random.random() + float(np.random.rand()) + torch.rand(1).item()
    index = torch.tensor([sample[0] for sample in samples])
    return Pair(index, torch.tensor([sample[1:] for sample in samples]) + noise)


class Collate:
    """With a generator of its own."""

    def __init__(self) -> None:
        self.numbers = random.Random(13)

    def __call__(self, samples: list[Any]) -> torch.Tensor:
        return torch.tensor([[*sample, self.numbers.random()] for sample in samples], dtype=torch.float64)


def reseed(worker: int) -> None:
    np.random.seed((torch.initial_seed() + worker) % 2**32)


def owned(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def loader(items: Dataset[Any], workers: int, *, batch_size: int | None = 4, **options: Any) -> Any:
    with warnings.catch_warnings():
        # torch warns of more workers than cores.
        warnings.simplefilter("ignore")
        options = {"batch_size": batch_size, **options}
        if "batch_sampler" in options:
            del options["batch_size"]
        return DataLoader(items, num_workers=workers, **options)


def _shuffled_own(loads: str, workers: int, **options: Any) -> Any:
    return loader(Items(loads), workers, shuffle=True, generator=owned(7), **options)


Make = Callable[[str], Any]
LOADERS: dict[str, Make] = {
    "main": lambda loads: loader(Items(loads), 0),
    "main, shuffled": lambda loads: loader(Items(loads), 0, shuffle=True),
    "main, shuffled by its own": lambda loads: _shuffled_own(loads, 0),
    "main, replacement": lambda loads: loader(
        Items(loads), 0, sampler=RandomSampler(range(ITEMS), replacement=True, num_samples=40)
    ),
    "main, eager": lambda loads: loader(Items(loads), 0, sampler=Eager()),
    "main, uneven batches": lambda loads: loader(Items(loads), 0, batch_sampler=EagerBatches()),
    "main, lazy": lambda loads: loader(Items(loads), 0, sampler=LazyOwn()),
    "main, single items": lambda loads: loader(Items(loads, 6), 0, batch_size=None, shuffle=True),
    "main, data with generators": lambda loads: loader(Owning(loads), 0, shuffle=True),
    "main, transformed": lambda loads: loader(Transformed(loads), 0, shuffle=True, collate_fn=Collate()),
    "main, collate": lambda loads: loader(Items(loads), 0, shuffle=True, collate_fn=collate),
    "1 worker": lambda loads: loader(Items(loads), 1, shuffle=True),
    "2 workers": lambda loads: loader(Items(loads), 2),
    "2 workers, shuffled": lambda loads: loader(Items(loads), 2, shuffle=True, prefetch_factor=1),
    "2 workers, distributed": lambda loads: loader(
        Items(loads, 30), 2, batch_size=3, sampler=DistributedSampler(range(30), num_replicas=2, rank=1)
    ),
    "2 workers, eager": lambda loads: loader(Items(loads), 2, sampler=Eager()),
    "2 workers, lazy": lambda loads: loader(Items(loads), 2, sampler=LazyOwn(), prefetch_factor=1),
    "2 workers, uneven batches": lambda loads: loader(Items(loads), 2, batch_sampler=EagerBatches()),
    "2 workers, single items": lambda loads: loader(Items(loads, 7), 2, batch_size=None, shuffle=True),
    "2 workers, collate, init": lambda loads: loader(
        Items(loads), 2, shuffle=True, collate_fn=collate, worker_init_fn=reseed
    ),
    "2 workers, transformed": lambda loads: loader(
        Transformed(loads), 2, shuffle=True, collate_fn=Collate(), worker_init_fn=reseed
    ),
    "2 persistent": lambda loads: loader(Items(loads, 18), 2, shuffle=True, persistent_workers=True),
    "2 persistent, transformed": lambda loads: loader(
        Transformed(loads), 2, shuffle=True, collate_fn=Collate(), persistent_workers=True
    ),
    "2 persistent by its own": lambda loads: _shuffled_own(loads, 2, persistent_workers=True),
    "2 persistent, distributed": lambda loads: loader(
        Items(loads, 23), 2, batch_size=3, persistent_workers=True, generator=owned(9), drop_last=True,
        sampler=DistributedSampler(range(23), num_replicas=2, rank=1, seed=5, drop_last=True),
    ),
    "2 persistent, eager": lambda loads: loader(
        Items(loads), 2, sampler=Eager(), persistent_workers=True, worker_init_fn=reseed
    ),
    "3 persistent, one idle": lambda loads: loader(
        Items(loads, 6), 3, shuffle=True, persistent_workers=True, worker_init_fn=reseed
    ),
    "2 persistent, eager batches": lambda loads: loader(
        Items(loads), 2, batch_sampler=EagerBatches(), persistent_workers=True
    ),
    "2 persistent, eager items": lambda loads: loader(
        Items(loads, 7), 2, batch_size=None, sampler=Eager(7), persistent_workers=True
    ),
}  # fmt: skip


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def loop_draws() -> None:
    """Return the draws of a loop's body between two batches."""
    random.random()
    np.random.randn()
    torch.randn(3)


def numbers_now() -> str:
    return hashlib.blake2b(repr(rng.capture()).encode(), digest_size=8).hexdigest()


def plain(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    if isinstance(batch, dict):
        return [(key, plain(item)) for key, item in batch.items()]
    if isinstance(batch, list | tuple):
        return [type(batch).__name__, *(plain(item) for item in batch)]
    return batch


class Record:
    """The record of a run: batches with the random numbers after each, and its position at each boundary."""

    def __init__(self) -> None:
        self.seen: dict[Key, Any] = {}
        self.positions: dict[Key, bytes] = {}
        self.sizes: dict[Key, int] = {}


def run(
    source: Any,
    epochs: range,
    resume: dict[str, Any] | None = None,
    *,
    leave_after: int = 1 << 30,
    sets_epoch: bool = True,
) -> Record:
    """Iterate over epochs. A boundary's key is (epoch, batches taken); (epoch, "end") after the last batch;
    (epoch, "after") after the code between two epochs."""
    record, source.sets_epoch = Record(), sets_epoch
    for epoch in epochs:
        source.begin(epoch, resume if epoch == epochs.start else None)
        while source.batches_taken < leave_after:
            key = epoch, source.batches_taken
            record.positions[key] = to_wire(source.position())
            try:
                batch = source.next()
            except StopIteration:
                break
            record.seen[key] = plain(batch), numbers_now()
            first = batch[0] if isinstance(batch, list | tuple) else batch
            record.sizes[key] = len(first) if isinstance(first, torch.Tensor) else 1
            loop_draws()
        record.seen[epoch, "end"] = numbers_now()
        record.positions[epoch, "end"] = to_wire(source.position())
        loop_draws()
        record.positions[epoch, "after"] = to_wire(source.position())
    source.close()
    return record


def resume(make: Callable[[], Any], position: bytes, epochs: range, **options: Any) -> Record:
    """Resume a new loader from a position, with other global generator states. Between two epochs, this
    function restores the global generators, as `attach` does."""
    seed(987)
    source, saved = source_of(make()), from_wire(position)
    seed(654)
    if saved["epoch"] != epochs.start:
        rng.restore(saved["now"]["global"])
    return run(source, epochs, saved, **options)


def first_epoch(cut: Key) -> int:
    """Return the epoch with which a run continues after a boundary."""
    return cut[0] + (cut[1] == "after")


def rest(record: Record, cut: Key, last: int = 1 << 30) -> dict[Key, Any]:
    """Return the record of the whole run after a boundary, until the epoch `last`."""
    order = list(record.seen)
    place = (cut[0] + 1, 0) if cut[1] == "after" else cut if cut in record.seen else (cut[0], "end")
    found = order[order.index(place) :] if place in order else []
    return {key: record.seen[key] for key in found if key[0] <= last}


def bare(loader: Any, epochs: range) -> dict[Key, Any]:
    """The same loop over the loader alone."""
    seen: dict[Key, Any] = {}
    for epoch in epochs:
        for sampler in (loader.sampler, loader.batch_sampler):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
        for taken, batch in enumerate(loader):
            seen[epoch, taken] = plain(batch), numbers_now()
            loop_draws()
        seen[epoch, "end"] = numbers_now()
        loop_draws()
    return seen


def loads_in(path: str) -> int:
    return os.path.getsize(path) if os.path.exists(path) else 0


def to_wire(value: Any) -> bytes:
    """Return a position as a snapshot holds it."""
    check_roundtrip(value, "position")
    return encode_json(value)


def from_wire(data: bytes) -> Any:
    return decode_json(data)


def saved(source: Any) -> Any:
    """Return the position of a source as it is read from a snapshot."""
    return from_wire(to_wire(source.position()))
