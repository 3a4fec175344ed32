"""Stores with all shards compressed against the contract."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from flashckpt.store.base import Store
from flashckpt.store.compressed_store import compressing
from flashckpt.store.local import LocalStore
from tests.contracts.flat_store import FlatStore
from tests.contracts.store_contract import OneProcessContract, shard

__all__ = ["shard"]


def compressed_local(path: str) -> Store:
    return compressing(LocalStore(path), "zstd")


def compressed_flat(path: str) -> Store:
    return compressing(FlatStore(f"flat://{path}"), "zstd")


class TestCompressedLocally(OneProcessContract):
    @pytest.fixture
    def opener(self, tmp_path: Path) -> Callable[[], Store]:
        return partial(compressed_local, str(tmp_path))


class TestCompressedInObjects(OneProcessContract):
    @pytest.fixture
    def opener(self, tmp_path: Path) -> Callable[[], Store]:
        return partial(compressed_flat, str(tmp_path))
