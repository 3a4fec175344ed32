"""The overlay of a dry run: reads see its writes, and the store does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashckpt.errors import DamagedError
from flashckpt.store.local import LocalStore
from flashckpt.store.overlay import OverlayStore
from tests.contracts.store_contract import SHARD, Shard, shard
from tests.recovery.scene import whole_tree

__all__ = ["shard"]


@pytest.fixture
def base(tmp_path: Path) -> LocalStore:
    store = LocalStore(str(tmp_path / "run"))
    for path in ("a/one", "a/two", "b/deep/three", "top"):
        store.create(path, path.encode())
    return store


def names(store: OverlayStore, folder: str) -> list[tuple[str, bool, int]]:
    return [(each.name, each.is_folder, each.num_bytes) for each in store.list(folder)]


def test_writes_are_seen_here_and_not_in_the_store(base: LocalStore, tmp_path: Path, shard: Shard) -> None:
    before, store = whole_tree(tmp_path), OverlayStore(base)
    assert not store.create("a/one", b"other")
    assert store.create("c/new", b"12")
    store.replace("a/two", b"2")
    store.remove("b/deep/three")
    store.remove("b/deep")
    written = store.write_shard(f"a/{SHARD}", shard.layout, shard.region)
    assert list(written.digests) == list(shard.contents.digests)
    assert written.checksums == shard.contents.shard.checksums
    shard_row = SHARD, False, shard.layout.num_bytes
    assert names(store, "a") == [("one", False, 5), shard_row, ("two", False, 1)]
    assert names(store, "") == [("a", True, 0), ("b", True, 0), ("c", True, 0), ("top", False, 3)]
    assert names(store, "b") == []
    assert (store.read("a/two", 9), store.read("c/new", 9), store.read("top", 9)) == (b"2", b"12", b"top")
    assert [store.exists(path) for path in ("b/deep/three", f"a/{SHARD}", "a/one")] == [False, True, True]
    with pytest.raises(FileNotFoundError):
        store.read("b/deep/three", 99)
    with pytest.raises(DamagedError):
        store.read("c/new", 1)
    with pytest.raises(FileExistsError):
        store.write_shard(f"a/{SHARD}", shard.layout, shard.region)
    assert whole_tree(tmp_path) == before


def test_what_is_removed_may_be_made_again(base: LocalStore) -> None:
    store = OverlayStore(base)
    store.remove_files(["a/one", "a/none"])
    assert store.create("a/one", b"anew")
    assert store.append("a/one", b"!", 99)
    assert store.read("a/one", 99) == b"anew", "a dry run has no ledger"
    assert store.read_bytes("a/one", 1, 2) == b"ne"
    store.remove_files(["a/one", "a/two"])
    store.remove("a")
    assert store.list("a") == []
    assert base.read("a/one", 99) == b"a/one"


def test_a_shard_of_the_overlay_has_no_bytes(base: LocalStore, shard: Shard) -> None:
    store = OverlayStore(base)
    store.write_shard(f"a/{SHARD}", shard.layout, shard.region)
    for read in (
        lambda: store.descriptor(f"a/{SHARD}", shard.layout.num_bytes),
        lambda: store.read_bytes(f"a/{SHARD}", 0, 1),
    ):
        with pytest.raises(OSError, match="no bytes"):
            read()
