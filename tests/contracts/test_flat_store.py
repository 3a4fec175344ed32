"""A store without folders, links and renames against the contract."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashckpt.store.base import Store
from tests.contracts.flat_store import FlatStore
from tests.contracts.store_contract import StoreContract, shard

__all__ = ["shard"]


class TestFlatStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return FlatStore(f"flat://{tmp_path}")
