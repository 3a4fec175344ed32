"""The model checker's stores against the contract of every store."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from flashckpt.store.base import Store
from tests.contracts.store_contract import OneProcessContract, shard
from tests.stores.memory_store import FolderStore, LiveServer, object_store

__all__ = ["shard"]


class TestFolderStore(OneProcessContract):
    @pytest.fixture
    def opener(self) -> Callable[[], Store]:
        return partial(FolderStore, LiveServer({"run": None}), "run")


class TestObjectStore(OneProcessContract):
    @pytest.fixture
    def opener(self) -> Callable[[], Store]:
        return partial(object_store, LiveServer(), "run")
