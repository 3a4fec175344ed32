"""An epoch that Accelerate divides by batches continues on another number of ranks. The oracle is the
sampler of Accelerate."""

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
import runs
import torch
from fresh import in_fresh_process
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from flashckpt.state import rng
from flashckpt.state.loader.order import RemainingSampler, Share, checked_fields, share_of
from flashckpt.state.loader.sources import source_of

BatchSamplerShard: Any = None
SeedableRandomSampler: Any = None
SIZES = [1, 5, 17]
MODES = [{"split_batches": split, "even_batches": True} for split in (False, True)]


@pytest.fixture(autouse=True, scope="module")
def _accelerate() -> None:
    """Import Accelerate in the tests, and not in each worker that collects them."""
    global BatchSamplerShard, SeedableRandomSampler
    loaders = pytest.importorskip("accelerate.data_loader")
    BatchSamplerShard, SeedableRandomSampler = loaders.BatchSamplerShard, loaders.SeedableRandomSampler


def shards(order: Any, size: int, ranks: int, drop_last: bool, mode: dict[str, bool]) -> list[Any]:
    """Return each rank's sampler, for batches of `size` samples on each rank."""
    batch_size = size * ranks if mode["split_batches"] else size
    return [
        BatchSamplerShard(BatchSampler(order, batch_size, drop_last), ranks, rank, **mode)
        for rank in range(ranks)
    ]


def shares(samplers: list[Any]) -> list[Share]:
    found = [share_of(SimpleNamespace(batch_sampler=each, generator=None)) for each in samplers]
    return [each for each in found if each is not None]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: "-".join(f"{k}={v}" for k, v in mode.items()))
def test_an_epoch_continues_on_another_number_of_ranks(mode: dict[str, bool], drop_last: bool) -> None:
    for length, size, ranks in itertools.product(SIZES, (1, 2, 3), (1, 2, 3, 4)):
        before = shards(SequentialSampler(range(length)), size, ranks, drop_last, mode)
        given = [list(each) for each in before]
        assert [list(BatchSampler(RemainingSampler(s), size, drop_last)) for s in shares(before)] == given
        fewest = min(map(len, given))
        for taken, other_ranks in itertools.product({0, 1, 2, 5, fewest - 1, fewest}, (1, 2, 3)):
            if not 0 <= taken <= fewest:
                continue
            (then, *_), other_size = shares(before), 1 + (length + taken) % 3
            now = shards(SequentialSampler(range(length)), other_size, other_ranks, drop_last, mode)
            rest = [each.remaining_after(then, taken) for each in shares(now)]
            first = [index for step in range(taken) for batches in given for index in batches[step]]
            done = min(taken * size * ranks, length)
            assert first[:done] == list(range(done))
            check_rest(rest, done, length, other_size, drop_last, mode)
            assert [each.all_batches - taken for each in rest] == [
                len(list(BatchSampler(RemainingSampler(each), other_size, drop_last))) for each in rest
            ]


def check_rest(
    rest: list[Share], done: int, length: int, size: int, drop_last: bool, mode: dict[str, bool]
) -> None:
    """Check that the rest is divided as Accelerate divides an epoch of the remaining samples; only the
    padding comes from the beginning of the whole order."""
    expected = [list(each) for each in shards(range(done, length), size, len(rest), drop_last, mode)]
    found = [list(BatchSampler(RemainingSampler(each), size, drop_last)) for each in rest]
    assert [[len(batch) for batch in each] for each in found] == [
        [len(batch) for batch in each] for each in expected
    ]
    turns = range(max(map(len, found)))
    flat, wanted = (
        [index for turn in turns for each in kind for batch in each[turn : turn + 1] for index in batch]
        for kind in (found, expected)
    )
    left = min(length - done, len(wanted))
    assert flat[:left] == wanted[:left] == list(range(done, done + left))
    assert flat[left:] == [(done + number) % length for number in range(left, len(flat))]
    if not drop_last:
        assert left == length - done


def test_a_chain_of_worlds_gives_each_sample_once() -> None:
    drawn = random.Random(3)
    for _ in range(40):
        length, mode = drawn.randrange(60, 120), drawn.choice(MODES)
        order = list(SeedableRandomSampler(range(length), data_seed=5))
        given: list[int] = []
        live: list[Share] = []
        taken = 0
        for _ in range(4):
            size, ranks = drawn.randrange(1, 4), drawn.randrange(1, 5)
            sampler = SeedableRandomSampler(range(length), data_seed=5)
            new = shares(shards(sampler, size, ranks, False, mode))
            live = [each.remaining_after(live[0], taken) for each in new] if live else new
            count, rows = (
                drawn.randrange(3),
                [list(BatchSampler(RemainingSampler(each), size, False)) for each in live],
            )
            given += [index for turn in range(count) for batches in rows for index in batches[turn]]
            taken += count
        given += [
            index
            for turn in range(count, len(rows[0]))
            for each in rows
            for b in each[turn : turn + 1]
            for index in b
        ]
        assert given[:length] == order
        assert given[length:] == order[: len(given) - length]


@pytest.mark.parametrize("epoch", [0, 3])
def test_accelerates_own_random_order_is_known(epoch: int) -> None:
    sampler = SeedableRandomSampler(range(20), data_seed=7)
    sampler.set_epoch(epoch)
    (first, _) = shares(shards(sampler, 2, 2, False, MODES[0]))
    assert list(first.order.indices()) == list(sampler)


def test_the_order_of_an_own_generator_is_drawn() -> None:
    sampler = RandomSampler(range(20), generator=torch.Generator().manual_seed(3))
    shard = shards(sampler, 2, 2, False, MODES[0])[1]
    loader = SimpleNamespace(batch_sampler=shard, generator=sampler.generator)
    generators = rng.Generators({"batch_sampler": shard})
    share = share_of(loader, generators)
    assert share is not None
    assert share.order is not None
    start = generators.capture_all()
    assert list(share.order.settled(start).indices()) == list(sampler)
    assert checked_fields(Share, share.value()) == share


def begun_where_an_epoch_has_ended(carry: bool) -> list[Any]:
    """Return the seed of the order of the next epoch, and its first indices, in a process that has resumed at
    the end of epoch 0."""
    from accelerate import PartialState
    from accelerate.data_loader import SeedableRandomSampler, prepare_data_loader

    PartialState(cpu=True)

    def made() -> Any:
        data: Any = list(range(6))
        loader: Any = DataLoader(data, 1, sampler=SeedableRandomSampler(data, data_seed=4))
        prepared = prepare_data_loader(loader, num_processes=2, process_index=0, put_on_device=False)
        return prepared, source_of(prepared)

    _, first = made()
    first.begin(0)
    for _ in range(3):
        first.next()
    position = runs.saved(first)
    loader, again = made()
    if carry:
        loader.set_epoch(1)
        again.begin(1, position, carry=True)
    else:
        again.begin(0, position)
        again.begin(1)
    batches = [again.next().item() for _ in range(2)]
    return [again.position()["share"]["order"]["seed"], *batches]


@pytest.mark.process
@pytest.mark.parametrize("carry", [False, True])
def test_the_order_of_an_epoch_after_a_resume_is_saved(carry: bool) -> None:
    order = torch.randperm(6, generator=torch.Generator().manual_seed(4 + 1)).tolist()
    assert in_fresh_process(begun_where_an_epoch_has_ended, carry) == [4 + 1, *order[:4:2]]


def test_an_unknown_order_is_not_divided() -> None:
    class Other(BatchSamplerShard):  # type: ignore[misc]
        def __iter__(self) -> Any:
            return iter([[0]])

    batches = BatchSampler(SequentialSampler(range(8)), 2, False)
    cut = SimpleNamespace(batch_sampler=BatchSamplerShard([[0, 1], [2]], 2, 1, even_batches=False))
    found = share_of(cut)
    assert found == Share(2, 1)
    own = share_of(SimpleNamespace(batch_sampler=Other(batches, 2, 1)))
    assert own is None or own.order is None


@pytest.mark.parametrize("chunk", [0, None, 3])
def test_a_share_with_another_division_is_refused(chunk: object) -> None:
    with pytest.raises(ValueError, match="share"):
        checked_fields(Share, {**Share(2, 1, 4).value(), "chunk": chunk})
