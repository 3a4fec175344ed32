"""How many names a start lists on an object store: beyond one folder on rank 0, no more for more ranks."""

import builtins
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashckpt.catalogue.home import checkpoint_of
from flashckpt.commit import attempts
from flashckpt.commit.choice import Choice, RankOffers, Stored, choose
from flashckpt.commit.view import View
from flashckpt.format.catalogue import Folder
from flashckpt.format.names import SnapshotId
from flashckpt.restore.step_choice import Agreement, Loaded, StepChoice
from flashckpt.restore.step_tensors import TensorSlice
from flashckpt.store.base import Entry, Store
from flashckpt.store.objects import ObjectStore
from flashckpt.store.read_plan import ReadPlan
from tests import run_view
from tests.commit.runs import HOLDER
from tests.contracts.flat_store import FlatClient
from tests.restore.sharded import Held, begun, committed
from tests.restore.snapshots import AnyLayout

RANKS, RANKS_A_NODE = 512, 8
MOST_NAMES = 100


class Bucket(FlatClient):
    """`listed`: the prefix of each name in a listing."""

    def __init__(self, folder: Path) -> None:
        super().__init__(f"flat://{folder}")
        self.listed: list[str] = []

    def list(self, prefix: str) -> builtins.list[Entry]:
        found = super().list(prefix)
        self.listed += [prefix] * len(found)
        return found

    def taken(self) -> builtins.list[str]:
        """The names that were listed since the last call, each as the prefix of its listing."""
        found, self.listed = self.listed, []
        return found

    def copy(self, source: str, target: str) -> None:
        """All objects below a folder, to below another one."""
        for each in super().list(source):
            self.put(f"{target}{each.name}", self.get_range(f"{source}{each.name}", 0, each.num_bytes))


def trained(store: Store, ranks: int, *steps: int, ranks_a_node: int) -> run_view.Record:
    """A run with these steps, of each rank one box of a tensor. Returns the record of the last."""
    attempt, whole = begun(store, ranks), np.arange(ranks, dtype="int32")
    held = [[Held("w", whole, TensorSlice((rank,), (1,)))] for rank in range(ranks)]
    values: Any = [{"state": {}}] * ranks
    how: Any = {"values": values, "ranks_a_part": ranks_a_node, "attempt": attempt}
    return [committed(store, held, step=step, **how) for step in steps][-1]


class Hearing(Agreement):
    """Of a rank that is not the first: it hears what rank 0 has decided, and lists nothing for that."""

    def __init__(self, store: Store) -> None:
        self._found = choose([], Stored.of(store))

    def choose(self, mine: RankOffers, decide: Callable[[Sequence[RankOffers]], Choice]) -> Choice:
        return self._found


def chosen(store: Store, rank: int) -> Loaded:
    agreement = Agreement() if rank == 0 else Hearing(store)
    loaded = StepChoice(View.of(store), [], rank, lambda snapshot: None, AnyLayout(), 1, agreement).choose()
    assert loaded is not None
    return loaded


def test_a_start_lists_the_data_of_one_step_and_on_one_rank(tmp_path: Path) -> None:
    bucket = Bucket(tmp_path)
    store: Store = ObjectStore(bucket)
    record = trained(store, RANKS, 400, ranks_a_node=RANKS_A_NODE)
    newest, folder = record.name, f"{record.folder}/"
    catalogue, older = View.of(store).catalogue, []
    for step in (100, 200, 300):
        there = Folder(catalogue.writer, SnapshotId(newest.attempt, step))
        bucket.copy(folder, f"{there.path}/")
        older.append(replace(record.manifest, folder=there, step=step))
        store.create(checkpoint_of(older[-1]).manifest_path, older[-1].to_bytes())
    listed_first = tuple(map(checkpoint_of, older))
    catalogue = replace(catalogue, checkpoints=(*listed_first, *catalogue.checkpoints))
    store.replace(catalogue.path, catalogue.to_bytes())

    bucket.taken()
    name = run_view.next_name(store)
    attempts.reserve(store, name)
    loaded = chosen(store, 0)
    run_view.begin_as(View.of(store), name, newest.id, newest.step, world=RANKS, owner=HOLDER)
    listed = bucket.taken()
    assert loaded.snapshot.step == 400
    # Once, before the step is read.
    assert listed.count(folder) == RANKS + RANKS // RANKS_A_NODE + 1
    assert sum(each != folder for each in listed) <= MOST_NAMES

    loaded = chosen(store, RANKS // 2)
    assert loaded.snapshot.tensors["w"].tolist() == [RANKS // 2]
    listed = bucket.taken()
    assert 0 < len(listed) <= MOST_NAMES
    assert not any(each.startswith("data/") for each in listed)


@pytest.mark.parametrize("kind", ["rank-00003", "node-00002"])
def test_rank_0_finds_a_missing_file_that_it_does_not_read(tmp_path: Path, kind: str) -> None:
    bucket = Bucket(tmp_path)
    store = ObjectStore(bucket)
    record = trained(store, 4, 300, 400, ranks_a_node=2)
    newest, folder = record.name, record.folder
    [gone] = [each.name for each in store.list(folder) if each.name.startswith(kind)]
    store.remove(f"{folder}/{gone}")
    choice = StepChoice(View.of(store), [], 0, lambda snapshot: None, AnyLayout(), 1)
    loaded = choice.choose()
    assert loaded.snapshot.step == 300
    [said] = choice.refused
    assert f"step {newest.step}" in said
    assert f"{folder}/{gone}: missing" in said
    assert not run_view.damaged(store), "its bytes may be right"
    assert chosen(store, 1).snapshot.step == newest.step, "here the vote of rank 0 is not heard"


def test_a_part_of_a_shard_is_read_without_a_listing(tmp_path: Path) -> None:
    bucket = Bucket(tmp_path)
    store = ObjectStore(bucket)
    whole = np.arange(4096, dtype="int64")
    record = committed(store, [[Held("w", whole, TensorSlice((0,), whole.shape))]])
    [(path, contents)] = record.files(0)
    plan, into = ReadPlan(), memoryview(bytearray(8))
    bucket.taken()
    plan.copy(path, contents, contents.data_start + 8 * 4000, 8, (), into, 0)
    plan.run(ObjectStore(bucket), 1)
    assert into.cast("q")[0] == 4000
    assert not bucket.taken()
