"""The local store, as it is opened and without hard links, and a store without folders, links and renames."""

import errno
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from flashckpt.store import open_store
from flashckpt.store.base import Store
from flashckpt.store.local import LocalStore, System
from tests.contracts.flat_store import FlatStore
from tests.contracts.store_contract import StoreContract, shard

__all__ = ["shard"]


class TestLocalStore(StoreContract):
    @pytest.fixture
    def opener(self, tmp_path: Path) -> Callable[[], Store]:
        return partial(open_store, str(tmp_path))

    def test_appends(self, store: Store) -> None:
        assert store.append("events/log", b"x" * 200, 100), "the first line is taken whatever its length"
        assert store.append("events/log", b"y" * 50, 250)
        assert not store.append("events/log", b"z", 250)
        assert store.read("events/log", 999) == b"x" * 200 + b"y" * 50
        with pytest.raises(ValueError, match="not a path inside a run"):
            store.append("../out", b"", 1)


class NoLinks(System):
    def link(self, source: str, target: str, source_folder: int, target_folder: int) -> None:
        raise OSError(errno.EPERM, "no links here", target)


class TestLocalStoreWithoutLinks(StoreContract):
    @pytest.fixture
    def opener(self, tmp_path: Path) -> Callable[[], Store]:
        return partial(LocalStore, str(tmp_path), NoLinks())


class TestFlatStore(StoreContract):
    @pytest.fixture
    def opener(self, tmp_path: Path) -> Callable[[], Store]:
        return partial(FlatStore, f"flat://{tmp_path}")
