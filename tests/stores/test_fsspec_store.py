"""fsspec's file systems against the contract, and the refusal of those on which no run may be trained."""

from __future__ import annotations

import secrets
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fsspec.registry import _registry

from flashckpt.errors import OptionError
from flashckpt.store import objects, open_store
from flashckpt.store.base import Store
from flashckpt.store.compressed_store import below
from flashckpt.store.fsspec_client import FsspecClient
from flashckpt.store.objects import PART_BYTES, ObjectStore, UploadRate
from tests.contracts.store_contract import OneProcessContract, Shard, StoreContract, shard
from tests.stores.ssh_server import SshServer

__all__ = ["shard"]


def opened(url: str, options: dict[str, Any]) -> ObjectStore:
    return ObjectStore(FsspecClient(url, options))


class TestLocalFileSystem(OneProcessContract):
    @pytest.fixture
    def opener(self, tmp_path: Path) -> Callable[[], Store]:
        return partial(opened, f"local://{tmp_path}", {})


class TestMemoryFileSystem(OneProcessContract):
    """In one process: not tested with several, and no run can be trained there."""

    @pytest.fixture
    def opener(self) -> Callable[[], Store]:
        return partial(opened, f"memory://{secrets.token_hex(8)}", {})


@pytest.mark.process
class TestSftp(StoreContract):
    @pytest.fixture
    def opener(self, ssh_server: SshServer, tmp_path: Path) -> Callable[[], Store]:
        return partial(opened, ssh_server.url(tmp_path), ssh_server.options())

    def test_a_lost_connection_is_opened_again(self, store: Store, ssh_server: SshServer) -> None:
        assert store.create("a/file", b"1")
        ssh_server.kill_connections()
        assert store.read("a/file", 9) == b"1"
        ssh_server.kill_connections()
        assert not store.create("a/file", b"2")
        ssh_server.kill_connections()
        assert store.create("b/file", b"3")
        assert [entry.name for entry in store.list("a")] == ["file"]


def test_requests_do_not_wait_for_another_threads_upload(tmp_path: Path) -> None:
    """A trainer's sign of life must not wait for a shard."""
    store, seen = opened(f"local://{tmp_path}", {}), []
    store.replace("alive", b"1")

    def beat() -> None:
        store.replace("alive", b"2")
        seen.append(store.read("alive", 9))

    def parts() -> Iterator[memoryview]:
        other = threading.Thread(target=beat, daemon=True)
        other.start()
        other.join(240)
        yield memoryview(b"shard" if seen else b"waited")

    store.client.upload("shard", parts(), PART_BYTES)
    assert store.read("shard", 9) == b"shard"
    assert seen == [b"2"]


def test_a_connection_is_reused_by_one_thread_at_a_time(tmp_path: Path) -> None:
    client = FsspecClient(f"local://{tmp_path}")
    for _ in range(3):
        assert client.list("") == []
        with pytest.raises(FileNotFoundError):
            client.size("none")
    assert len(client._idle) == 1


def test_a_rename_with_a_lost_answer_counts_as_success(tmp_path: Path) -> None:
    client = FsspecClient(f"local://{tmp_path}")
    rename, lost = client._adapter.rename_new, [True]

    def lose_answer(*arguments: Any) -> bool:
        done = rename(*arguments)
        if lost and done:
            lost.clear()
            raise ConnectionResetError
        return done

    client._adapter.rename_new = lose_answer  # type: ignore[method-assign]
    assert ObjectStore(client).create("file", b"mine")
    assert not ObjectStore(client).create("file", b"other")
    assert (tmp_path / "file").read_bytes() == b"mine"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_lost_rename_does_not_claim_another_clients_file(tmp_path: Path) -> None:
    client = FsspecClient(f"local://{tmp_path}")
    rename = client._adapter.rename_new

    def lose_request(system: Any, path: str, target: str) -> bool:
        client._adapter.rename_new = rename  # type: ignore[method-assign]
        (tmp_path / "claim").write_bytes(b"another's")
        Path(path).unlink()  # as a claimant removes the loser's file
        raise ConnectionResetError

    client._adapter.rename_new = lose_request  # type: ignore[method-assign]
    assert not ObjectStore(client).create("claim", b"mine"), "two would both continue"
    assert (tmp_path / "claim").read_bytes() == b"another's"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match="supports nowhere://"):
        open_store("nowhere://host/run")
    monkeypatch.delitem(_registry, "sftp", raising=False)
    monkeypatch.setitem(sys.modules, "paramiko", None)
    monkeypatch.delitem(sys.modules, "fsspec.implementations.sftp", raising=False)
    with pytest.raises(OptionError, match="package for sftp://.*paramiko"):
        open_store("sftp://host/run")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(OptionError, match=r"pip install 'flashckpt\[fsspec\]'"):
        open_store("sftp://host/run")


# ---- the ceiling


class Clock:
    """A clock that advances only by sleeping."""

    def __init__(self) -> None:
        self.now_s, self.pauses = 0.0, list[float]()

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, pause_s: float) -> None:
        self.pauses.append(pause_s)
        self.now_s += pause_s


def test_an_upload_keeps_the_rate_limit(shard: Shard) -> None:
    clock, bytes_per_s = Clock(), 4 << 20
    rate = UploadRate(bytes_per_s, clock=clock, sleep=clock.sleep)
    store = ObjectStore(FsspecClient(f"memory://{secrets.token_hex(8)}"), rate)
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


def test_all_stores_of_a_url_share_the_rate_limit(tmp_path: Path) -> None:
    url = f"local://{tmp_path}"
    one, two, other = (below(open_store(url, {objects.OPTION: rate << 20})) for rate in (1, 1, 2))
    assert one._rate is two._rate  # type: ignore[attr-defined]
    assert other._rate is not one._rate  # type: ignore[attr-defined]
    for wrong in (1000, "10M", 1.5, True, -1):
        with pytest.raises(OptionError, match="at least 1048576"):
            open_store(url, {objects.OPTION: wrong})
