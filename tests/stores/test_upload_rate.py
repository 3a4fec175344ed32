"""The limit of the rate at which a node sends to a store."""

from pathlib import Path

import pytest

from flashckpt.errors import OptionError
from flashckpt.store import objects, open_store
from flashckpt.store.objects import PART_BYTES, ObjectStore, UploadRate
from tests.contracts.flat_store import FlatClient
from tests.contracts.store_contract import Shard


class Clock:
    """A clock that advances only by sleeping."""

    def __init__(self) -> None:
        self.now_s, self.pauses = 0.0, list[float]()

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, pause_s: float) -> None:
        self.pauses.append(pause_s)
        self.now_s += pause_s


def test_an_upload_keeps_the_rate_limit(shard: Shard, tmp_path: Path) -> None:
    clock, bytes_per_s = Clock(), 4 << 20
    rate = UploadRate(bytes_per_s, clock=clock, sleep=clock.sleep)
    store = ObjectStore(FlatClient(f"flat://{tmp_path}"), rate)
    large = Shard(num_rows=8_000)
    for name in ("one", "two"):
        store.write_shard(name, large.layout, large.region)
    parts = -(-len(large.image) // PART_BYTES)
    assert parts > 3
    assert len(clock.pauses) == 2 * parts - 1, "the very first goes at once"
    last = len(large.image) - (parts - 1) * PART_BYTES
    assert clock.now_s == pytest.approx((2 * len(large.image) - last) / bytes_per_s)
    store.create("small", bytes(bytes_per_s))
    before = clock.now_s
    store.write_shard("three", shard.layout, shard.region)
    assert clock.now_s - before == pytest.approx((last + bytes_per_s) / bytes_per_s), "it waits for both"


def test_all_stores_of_a_url_share_the_rate_limit() -> None:
    url, keys = "s3://bucket/run", {"region": "r", "access_key_id": "id", "secret_access_key": "key"}
    one, two, other = (open_store(url, {**keys, objects.OPTION: rate << 20}) for rate in (1, 1, 2))
    assert one._rate is two._rate  # type: ignore[attr-defined]
    assert other._rate is not one._rate  # type: ignore[attr-defined]
    for wrong in (1000, "10M", 1.5, True, -1):
        with pytest.raises(OptionError, match="at least 1048576"):
            open_store(url, {**keys, objects.OPTION: wrong})
