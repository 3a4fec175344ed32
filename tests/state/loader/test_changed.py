"""A loader that has changed since the checkpoint was taken is logged or refused, never accepted silently."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import runs
from torch.utils.data import DataLoader, DistributedSampler

from flashckpt.errors import BoundaryError, MismatchError
from flashckpt.state.loader.source import ReplayedSource
from flashckpt.state.loader.sources import source_of


@pytest.fixture(autouse=True)
def _logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="flashckpt")


def position_of(loader: Any, batches: int) -> dict[str, Any]:
    source = source_of(loader)
    source.begin(0)
    for _ in range(batches):
        source.next()
    position = runs.saved(source)
    source.close()
    return position


@pytest.mark.parametrize(
    ("options", "messages"),
    [
        ({"count": 8, "batch_size": 2}, ["batch_size is 2 and was 1", "dataset_length is 8 and was 4"]),
        (
            {"count": 4, "batch_size": 1, "shuffle": True, "drop_last": True},
            ["drop_last is True and was False", "sampler is RandomSampler and was SequentialSampler"],
        ),
    ],
)
def test_another_loader_with_as_many_batches_is_logged(
    options: dict[str, Any], messages: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    position = position_of(runs.loader(runs.Items("/dev/null", 4), 0, batch_size=1), 2)
    items = runs.Items("/dev/null", options.pop("count"))
    again = source_of(runs.loader(items, 0, **options))
    again.begin(0, position)
    assert "Not exact" in caplog.text
    assert all(message in caplog.text for message in messages)
    assert again.batches_taken == 2


def test_another_order_on_the_same_ranks_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def make(seed: int) -> Any:
        shares = DistributedSampler(range(24), 2, 0, seed=seed)  # type: ignore[arg-type]
        return runs.loader(runs.Items("/dev/null", 24), 0, batch_size=2, sampler=shares)

    source = source_of(make(9))
    source.begin(0, position_of(make(0), 2))
    assert "Not exact: the sampler of DataLoader has another order" in caplog.text
    assert len(source) == 6


def test_another_batch_size_of_a_stream_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    position = position_of(DataLoader(runs.StatefulStream(), 2), 2)
    source_of(DataLoader(runs.StatefulStream(), 3)).begin(0, position)
    assert "batch_size is 3 and was 2" in caplog.text


def numbers(count: int) -> Iterator[int]:
    yield from range(count)


@pytest.mark.parametrize("make", [numbers, lambda count: iter(list(range(count)))])
def test_a_used_iterator_is_not_replayed(make: Any) -> None:
    batches = make(20)
    position = position_of(batches, 5)
    with pytest.raises(BoundaryError, match="already drawn"):
        source_of(batches).begin(0, position)
    assert next(batches) == 5
    fresh = source_of(make(20))
    fresh.begin(0, position)
    assert fresh.next() == 5


def test_an_iterator_that_ends_during_its_replay_is_an_error() -> None:
    position = position_of(numbers(20), 5)
    with pytest.raises(MismatchError, match="ended after 3 batches") as caught:
        source_of(numbers(3)).begin(0, position)
    assert caught.value.differences == (("batches of the loader", "5", "3"),)


def test_a_replay_logs_a_line_every_few_seconds(caplog: pytest.LogCaptureFixture) -> None:
    position = position_of(numbers(20), 12)
    seconds = iter(range(100))
    ReplayedSource(numbers(20), clock=lambda: float(next(seconds))).begin(0, position)
    lines = [entry.message for entry in caplog.records if entry.levelname == "INFO"]
    assert lines == ["4 of 12 batches drawn again.", "9 of 12 batches drawn again."]
