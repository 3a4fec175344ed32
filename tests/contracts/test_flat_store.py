"""A store without folders, links and renames against the contract."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from flashckpt.commit.view import open_run
from flashckpt.errors import RunError
from flashckpt.store.base import Capabilities, Store
from tests.contracts.flat_store import FlatStore
from tests.contracts.store_contract import StoreContract, shard

__all__ = ["shard"]


class TestFlatStore(StoreContract):
    @pytest.fixture
    def opener(self, tmp_path: Path) -> Callable[[], Store]:
        return partial(FlatStore, f"flat://{tmp_path}")


class Overwriting(FlatStore):
    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, conditional_create=False)


def test_nothing_is_written_where_a_commit_could_be_overwritten(tmp_path: Path) -> None:
    """Also refused if the run exists, made by another client or a copy."""
    run = open_run(FlatStore(f"flat://{tmp_path}/run"), create=True)
    for name in ("run", "other"):
        with pytest.raises(RunError, match="only read here"):
            open_run(Overwriting(f"flat://{tmp_path}/{name}"), create=True)
    assert open_run(Overwriting(f"flat://{tmp_path}/run"), create=False) == run, "it can be read"
