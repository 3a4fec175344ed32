"""Runs that older versions wrote are read, byte for byte, by this one."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.numpy import load_file

from flashckpt.commit.attempts import attempts
from flashckpt.commit.lineage import everything
from flashckpt.commit.marks import marks
from flashckpt.commit.reading import candidates, resolve, steps
from flashckpt.commit.run import open_run
from flashckpt.commit.steps import is_committed, read_manifest, read_step
from flashckpt.commit.verification import verify
from flashckpt.format.records import Tombstone
from flashckpt.store.base import Store, open_store
from tests.commit.runs import is_whole, leaves_of


@pytest.fixture(params=sorted(Path(__file__).parent.glob("format-*")), ids=lambda path: path.name)
def store(request: pytest.FixtureRequest) -> Store:
    return open_store(request.param)


def test_what_it_holds(store: Store) -> None:
    assert open_run(store, create=False).run_id
    known = attempts(store)
    assert [(info.name.number, info.ended) for info in known] == [(1, "dead"), (2, "closed"), (3, "closed")]
    assert [info.start is not None and info.start.step for info in known] == [0, 200, 200]
    assert steps(store) == [200, 250]
    assert [each.step for each in candidates(store)] == [250, 200]  # the mark is another host's
    begun = [(each.step, each.attempt.number) for each in everything(store)]
    assert begun == [(300, 1), (260, 3), (250, 3), (200, 1), (100, 1)]


def test_every_byte_is_the_one_that_was_written(store: Store) -> None:
    report = verify(store, all_steps=True)
    assert report.ok, report.damaged
    for each in everything(store):
        if is_committed(store, each.step, each.attempt):
            assert is_whole(store, each.step, each.attempt)
    first = attempts(store)[0].name
    record = read_step(store, 300, first)
    constants = record.rank(0).constants
    assert constants is not None
    assert [leaf.name for leaf in constants.leaves] == ["frozen.weight"]
    assert set(load_file(resolve(store, 250).shard_path(0))) == set(leaves_of(250))


def test_marks_and_tombstones(store: Store) -> None:
    known = attempts(store)
    assert [each.host for each in marks(store, 250, known[2].name)] == ["node-7"]
    assert isinstance(read_manifest(store, 100, known[0].name), Tombstone)
    assert read_manifest(store, 260, known[2].name) is None
