"""The data-parallel size changes in the middle of an epoch: no sample is given twice or missed, all ranks
have as many batches, and what cannot be carried is refused by name."""

import copy
import itertools
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, Sampler

from flashckpt.checkpointer.progress import Progress
from flashckpt.errors import DamagedError, MismatchError
from flashckpt.state.loader.other_ranks import merged_progress
from tests.checkpointer.data_parallel import (
    Ranks,
    ReplicaAssignment,
    Values,
    go_through,
    is_one_epoch,
    order_of,
)
from tests.checkpointer.test_loaders import Keeping

divisions = st.builds(
    ReplicaAssignment,
    ranks=st.integers(1, 9),
    batch=st.integers(1, 5),
    even=st.booleans(),
    whole=st.booleans(),
)


def changes_ranks(chain: list[ReplicaAssignment]) -> bool:
    """One rank alone that only has another batch size goes on at the batch that it had: warned, not exact."""
    return all(max(one.ranks, other.ranks) > 1 for one, other in itertools.pairwise(chain))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    chain=st.lists(divisions, min_size=1, max_size=4).filter(changes_ranks),
    cuts=st.lists(st.integers(0, 7), min_size=3, max_size=3),
    samples=st.integers(1, 130),
    epoch=st.integers(0, 2),
    shuffle=st.booleans(),
)
def test_no_sample_is_given_twice_or_missed(
    chain: list[ReplicaAssignment], cuts: list[int], samples: int, epoch: int, shuffle: bool
) -> None:
    seen, last = go_through(chain, cuts[: len(chain) - 1], samples, epoch=epoch, shuffle=shuffle)
    assert is_one_epoch(seen, order_of(samples, epoch, shuffle=shuffle), last)


def test_each_rank_goes_on_as_the_division_says() -> None:
    """Entry by entry: rank r of 3 gets every third sample of what 2 ranks have left."""
    order = order_of(24, 0)
    ranks = Ranks(lambda rank, _: ReplicaAssignment(2, 2).loader(24, rank), 2)
    assert ranks.take(2) == 2
    rest = order[8:] + order[:2]  # padded, to 6 for each
    ranks = Ranks(lambda rank, _: ReplicaAssignment(3, 2).loader(24, rank), 3, values=ranks.saved())
    assert ranks.lengths == [2 + 3] * 3
    assert ranks.take(9) == 3
    for rank, batches in enumerate(ranks.by_rank):
        assert batches == [rest[rank::3][i : i + 2] for i in range(0, len(rest[rank::3]), 2)]


def test_positions_and_the_epoch_after() -> None:
    """Batches are counted on from where the old ranks stood, and the next epoch is one of the new ranks'."""
    ranks = Ranks(lambda rank, _: ReplicaAssignment(4, 3).loader(60, rank), 4)
    ranks.take(2)
    ranks = Ranks(lambda rank, _: ReplicaAssignment(2, 3).loader(60, rank), 2, values=ranks.saved())
    [source, _] = ranks.sources
    assert source.batches_taken == 2
    assert ranks.take(99) == 6
    assert source.batches_taken == len(source) == 8
    for progress in ranks.progresses:
        assert progress.step == 8
        progress.close_batches()
        progress.next_epoch()
    ranks.seen.clear()
    ranks.sources = [
        progress.open_batches(loader, sets_epoch=True)
        for progress, loader in zip(ranks.progresses, ranks.loaders, strict=True)
    ]
    assert ranks.take(99) == 10
    assert ranks.seen == [
        *torch.tensor(order_of(60, 1)).reshape(10, 3, 2).transpose(1, 2).reshape(-1).tolist()
    ]


def plain(samples: int, batch: int, *, shuffle: bool, seed: int | None = None) -> Any:
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    data: Any = range(samples)
    return DataLoader(data, batch, shuffle=shuffle, generator=generator)


@pytest.mark.parametrize(("shuffle", "seed"), [(True, None), (True, 11), (False, None)])
def test_one_process_without_a_distributed_sampler_and_back(seed: int | None, shuffle: bool) -> None:
    """A plain loader's epoch goes on on three ranks, and that of the three in one process again."""
    torch.manual_seed(3)
    alone = Ranks(lambda rank, ranks: plain(50, 4, shuffle=shuffle, seed=seed), 1)
    alone.take(2)
    three = Ranks(lambda rank, _: ReplicaAssignment(3, 2).loader(50, rank), 3, values=alone.saved())
    three.take(3)
    again = Ranks(lambda rank, ranks: plain(50, 5, shuffle=True), 1, values=three.saved())
    again.take(99)
    torch.manual_seed(3)
    whole = [index for batch in plain(50, 4, shuffle=shuffle, seed=seed) for index in batch.tolist()]
    assert alone.seen == whole[:8]
    assert sorted(three.seen) == sorted(whole[8:26])
    assert again.seen == whole[26:]


def test_an_epoch_that_the_old_ranks_have_ended_is_over_for_the_new_ones() -> None:
    """Also at the boundary of its last batch, where nobody has asked for another yet; what `drop_last` leaves
    out stays out."""
    ranks = Ranks(lambda rank, _: ReplicaAssignment(2, 2, even=True, whole=True).loader(11, rank), 2)
    assert ranks.lengths == [2, 2]
    assert ranks.take(2) == 2
    now = Ranks(lambda rank, _: ReplicaAssignment(3, 1).loader(11, rank), 3, values=ranks.saved())
    assert now.lengths == [2, 2, 2]
    assert now.take(1) == 0
    assert all(source is not None and source.was_over and len(source) == 2 for source in now.sources)


# ---- what is refused


class ByRank(Sampler[list[int]]):
    """A batch sampler of a program's own, which takes rank and size."""

    def __init__(self, samples: int, batch: int, rank: int, world_size: int) -> None:
        self.samples, self.batch, self.rank, self.world_size = samples, batch, rank, world_size

    def __iter__(self) -> Iterator[list[int]]:
        own = list(range(self.rank, self.samples, self.world_size))
        return iter([own[at : at + self.batch] for at in range(0, len(own), self.batch)])


class Stream(IterableDataset[int]):
    def __init__(self, samples: int, rank: int, ranks: int) -> None:
        self.samples, self.part = samples, slice(rank, None, ranks)

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.samples)[self.part])


MAKE: dict[str, Any] = {
    "batch sampler": lambda rank, ranks: DataLoader(range(36), batch_sampler=ByRank(36, 2, rank, ranks)),  # type: ignore[arg-type]
    "iterable data set": lambda rank, ranks: DataLoader(Stream(36, rank, ranks), 2),
    "own state": lambda rank, ranks: Keeping(own=range(rank, 36, ranks)),
    "list": lambda rank, ranks: [
        list(range(36))[rank::ranks][at : at + 2] for at in range(0, 36 // ranks, 2)
    ],
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", MAKE)
def test_what_is_divided_by_code_that_is_not_known_is_refused(name: str) -> None:
    ranks = Ranks(MAKE[name], 2)
    ranks.take(3)
    values = ranks.saved()
    for rank in range(3):
        progress = taken_up(values, rank, 3)
        with pytest.raises(MismatchError, match=r"cannot be divided again.*DistributedSampler") as caught:
            progress.open_batches(MAKE[name](rank, 3))
        assert caught.value.differences[0][0] == "loader"


@pytest.mark.parametrize("name", MAKE)
def test_the_same_between_two_epochs_begins_with_the_next(name: str) -> None:
    """Nothing is left of an epoch that has ended: the next one is the new ranks'."""
    ranks = Ranks(MAKE[name], 2)
    ranks.take(99)
    for progress in ranks.progresses:
        progress.close_batches()
        progress.next_epoch()
    values = ranks.saved()
    now = Ranks(MAKE[name], 3, epoch=1, values=values)
    now.take(99)
    assert sorted(now.seen) == list(range(36))


def taken_up(values: Values, rank: int, ranks: int) -> Progress:
    progress = Progress()
    progress.manages_epochs = True
    progress.restore(merged_progress(values, rank, ranks, len(values)))
    return progress


def test_a_loader_may_say_that_its_position_means_the_same_on_every_rank() -> None:
    class Global(Keeping):
        position_is_global = True

    ranks = Ranks(lambda rank, _: Global(own=range(12)), 2)
    ranks.take(5)
    values = ranks.saved()
    now = Ranks(lambda rank, _: Global(own=range(12)), 3, values=values)
    now.take(99)
    assert now.by_rank == [[[5], [6], [7], [8], [9], [10], [11]]] * 3

    # Said, and not so: the states differ.
    values[1]["sources"][0]["position"]["parts"]["state"] = {"taken": 4}
    with pytest.raises(MismatchError):
        taken_up(values, 0, 3).open_batches(Global(own=range(12)))


def test_a_data_set_of_another_length_is_refused() -> None:
    ranks = Ranks(lambda rank, _: ReplicaAssignment(2, 2).loader(30, rank), 2)
    ranks.take(3)
    with pytest.raises(
        MismatchError, match=r"2 data-parallel ranks \(30 samples\).*3 data-parallel ranks \(31"
    ):
        taken_up(ranks.saved(), 0, 3).open_batches(ReplicaAssignment(3, 2).loader(31, 0))


def test_each_in_an_order_of_its_own_is_not_divided(caplog: pytest.LogCaptureFixture) -> None:
    """Plain shuffled loaders on two ranks: each goes over everything."""
    caplog.set_level(logging.WARNING, logger="flashckpt")

    def make(rank: int, ranks: int) -> Any:
        return plain(20, 2, shuffle=True, seed=rank)

    ranks = Ranks(make, 2)
    ranks.take(4)
    values = ranks.saved()
    with pytest.raises(MismatchError):
        taken_up(values, 0, 3).open_batches(ReplicaAssignment(3, 2).loader(20, 0))
    now = Ranks(make, 1, values=values)
    now.take(99)
    assert sorted(ranks.by_rank[0] + now.by_rank[0]) == sorted(now.by_rank[0] + ranks.by_rank[0])
    assert sorted(sum(ranks.by_rank[0] + now.by_rank[0], [])) == list(range(20))
    assert "does not divide its data among the ranks" in caplog.text


# ---- ranks that share data


def test_the_size_is_the_samplers_and_not_the_worlds() -> None:
    """Four processes, two of tensor parallelism for each of two data-parallel ranks; then eight, 2 x 4."""
    ranks = Ranks(lambda rank, _: ReplicaAssignment(2, 3).loader(60, rank // 2), 4)
    ranks.take(3)
    now = Ranks(lambda rank, _: ReplicaAssignment(2, 3).loader(60, rank // 4), 8, values=ranks.saved())
    now.take(99)
    for rank in range(8):
        assert ranks.by_rank[rank // 4 * 2] + now.by_rank[rank] == expected(rank // 4)


def expected(data_rank: int) -> list[list[int]]:
    sampler = ReplicaAssignment(2, 3).loader(60, data_rank)
    return [batch.tolist() for batch in sampler]


def test_ranks_that_share_a_plain_loader() -> None:
    """Tensor parallelism alone, all seeded alike: more ranks go on with the same batches."""

    def make(rank: int, ranks: int) -> Any:
        return plain(20, 2, shuffle=True, seed=4)

    ranks = Ranks(make, 2)
    ranks.take(4)
    now = Ranks(make, 4, values=ranks.saved())
    now.take(99)
    assert now.by_rank[0] == now.by_rank[3]
    assert sorted(sum(ranks.by_rank[0] + now.by_rank[0], [])) == list(range(20))


# ---- what is merged


def two_ranks(batches: int = 2) -> Values:
    ranks = Ranks(lambda rank, _: ReplicaAssignment(2, 2).loader(30, rank), 2)
    ranks.take(batches)
    return ranks.saved()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("step",), 3),
        (("epoch",), 1),
        (("sources", 0, "is_open"), False),
        (("sources", 0, "position", "batches_taken"), 1),
        (("sources", 0, "position", "share", "batch_size"), 3),
        (("sources", 0, "position", "share", "order", "seed"), 6),
    ],
)
def test_ranks_at_different_places_are_refused(path: tuple[Any, ...], value: object) -> None:
    values = two_ranks()
    put(values[1], path, value)
    for rank in range(3):
        with pytest.raises(MismatchError, match=r"rank 0.*rank 1|rank 1.*rank 0"):
            merged_progress(values, rank, 3, 2)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("sources",), None),
        (("sources", 0), {}),
        (("sources", 0, "position"), []),
        (("sources", 0, "position", "share"), 5),
        (("sources", 0, "position", "now"), {}),
    ],
)
def test_what_cannot_be_read_is_refused(path: tuple[Any, ...], value: object) -> None:
    values = two_ranks()
    for each in values.values():
        put(each, path, value)
    with pytest.raises(DamagedError):
        taken_up(values, 2, 3)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("share",), {"ranks": 2}),
        (("share", "ranks"), 0),
        (("share", "rank"), 2),
        (("share", "batch_size"), 0),
        (("share", "order", "seed"), "by dice"),
        (("share", "order", "length"), -1),
        (("share", "samples"), True),
        (("moved",), {"ranks": "2", "world": 3, "alike": True}),
    ],
)
def test_a_share_that_cannot_be_is_refused(path: tuple[Any, ...], value: object) -> None:
    progress = taken_up(two_ranks(), 0, 3)
    saved = progress.value()
    put(saved["sources"][0]["position"], path, value)
    with pytest.raises(DamagedError, match="No loader was touched"):
        Progress().restore(saved)


def put(value: Any, path: tuple[Any, ...], new: object) -> None:
    for key in path[:-1]:
        value = value[key]
    value[path[-1]] = new


def test_a_position_that_was_moved_and_not_taken_up_is_moved_again() -> None:
    """Two restarts in a row before any batch: the first move counts."""
    values = two_ranks(3)
    seen = order_of(30, 0)[:12]
    progresses = {rank: taken_up(values, rank, 3) for rank in range(3)}
    again = {rank: copy.deepcopy(progress.value()) for rank, progress in progresses.items()}
    now = Ranks(lambda rank, _: ReplicaAssignment(5, 1).loader(30, rank), 5, values=again)
    now.take(99)
    assert sorted(seen + now.seen[:18]) == list(range(30))
    [moved] = {str(each["sources"][0]["position"]["moved"]) for each in again.values()}
    assert moved == str({"ranks": 2, "world": 3, "alike": True})
