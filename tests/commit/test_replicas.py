"""Replicas are alike, or the step is not committed, and the error says which rank holds another leaf."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flashckpt.catalogue import home
from flashckpt.commit import attempts, steps
from flashckpt.commit.commit_step import Outcome
from flashckpt.commit.steps import read_step
from flashckpt.commit.view import View
from flashckpt.errors import DamagedError, DivergedError
from flashckpt.format.layout import Replicas, ranks_of
from flashckpt.format.manifest import shard_name
from flashckpt.format.names import AttemptName
from flashckpt.format.records import Part, RankRecord
from flashckpt.store.local import LocalStore
from tests.commit.runs import attempt_at, commit_published, contents_of, folder_of, name_of, put, write_shard

WORLD = 4
NAMES = ("model.bias", "model.weight", "optimizer.step")
WRITERS: dict[str, int | None] = {"model.bias": 1, "model.weight": 3, "optimizer.step": None}


def rank_record(
    store: LocalStore,
    attempt: AttemptName,
    rank: int,
    *,
    changed: Sequence[str] = (),
    by_rank: Sequence[str] = (),
    writers: dict[str, int | None] | None = None,
) -> RankRecord:
    """A rank of WORLD that holds NAMES like all others, but for those that `changed`; `by_rank` are those
    that it does not declare."""
    writers = writers or WRITERS
    values = {name: np.full(4, len(name) + (rank + 1) * (name in changed), "float32") for name in NAMES}
    _, all_of_it = contents_of("rank-00000-aaaa.safetensors", values)
    digest_of = dict(zip((leaf.name for leaf in all_of_it.leaves), all_of_it.digests, strict=True))
    declared = [leaf for leaf in all_of_it.leaves if leaf.name not in by_rank]
    own = {n: v for n, v in values.items() if n in by_rank or writers[n] in (None, rank)}
    own["buffer"] = np.array([rank], "int64")
    image, contents = contents_of(shard_name(rank, "5f2c0a1b"), own)
    folder = folder_of(store, name_of(100, attempt).id)
    write_shard(store, f"{folder.path}/{contents.file}", image, contents.layout())
    table = Replicas(
        ranks=ranks_of(range(WORLD)),
        leaves=tuple(replace(leaf, offset=-1) for leaf in declared),
        digests=tuple(digest_of[leaf.name] for leaf in declared),
        writers=tuple(writers[leaf.name] for leaf in declared),
    )
    return RankRecord(
        rank=rank,
        shard=contents,
        values={},
        replicas=(table,) if declared else (),
    )


def commit(store: LocalStore, attempt: AttemptName) -> Outcome:
    return commit_published(store, name_of(100, attempt).id)


def publish_all(store: LocalStore, attempt: AttemptName, of_rank: dict[int, RankRecord]) -> None:
    """Two nodes of two ranks."""
    ranks = [of_rank.get(rank) or rank_record(store, attempt, rank) for rank in range(WORLD)]
    for node in (ranks[:2], ranks[2:]):
        id, first = name_of(100, attempt).id, node[0].rank
        put(store, Part(id=id, step=100, world=WORLD, node=first, ranks=tuple(node)))


def test_who_diverged_is_named_and_nothing_is_committed(store: LocalStore, attempt: AttemptName) -> None:
    publish_all(
        store, attempt, {2: rank_record(store, attempt, 2, changed=["model.weight", "optimizer.step"])}
    )
    for _ in range(2):
        with pytest.raises(DivergedError, match=r"rank 2: model\.weight, optimizer\.step") as caught:
            commit(store, attempt)
        assert (caught.value.ranks, caught.value.step) == ((2,), 100)
        assert caught.value.leaves == ("model.weight", "optimizer.step")
        assert View.of(store).checkpoints == ()
    # Nor does a start adopt it.
    assert attempts.settle(View.of(store))[0].checkpoints == ()
    attempt_at(store)
    assert View.of(store).checkpoints == ()


@pytest.mark.parametrize(
    ("harmed", "how", "leaves"),
    [
        ((1, 3), {"changed": ["model.bias"]}, ("model.bias",)),
        # It may have learned before them that a leaf has diverged: until all know, no step of them is one.
        ((0,), {"by_rank": ["model.weight"]}, ("model.weight",)),
        ((3,), {"by_rank": NAMES}, NAMES),
        # Else a leaf might have no writer, though every rank's files are what its own table says.
        ((3,), {"writers": {**WRITERS, "model.weight": 0}}, ("model.weight",)),
    ],
    ids=["two ranks", "not declared", "nothing declared", "divided otherwise"],
)
def test_each_difference_is_named(
    store: LocalStore, attempt: AttemptName, harmed: tuple[int, ...], how: dict[str, Any], leaves: object
) -> None:
    publish_all(store, attempt, {rank: rank_record(store, attempt, rank, **how) for rank in harmed})
    with pytest.raises(DivergedError) as caught:
        commit(store, attempt)
    assert caught.value.leaves == leaves
    assert "writers" in how or caught.value.ranks == harmed


@pytest.mark.parametrize("most_bytes", [0, 1 << 20])
def test_a_step_whose_parts_were_exchanged_is_damaged(
    store: LocalStore, attempt: AttemptName, monkeypatch: pytest.MonkeyPatch, most_bytes: int
) -> None:
    """Whatever made a manifest for it."""
    publish_all(store, attempt, {2: rank_record(store, attempt, 2, changed=["model.weight"])})
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(home, "unlike", lambda _: {})
        assert commit(store, attempt)
    monkeypatch.setattr(steps, "_WHOLE_BYTES", most_bytes)
    with pytest.raises(DamagedError, match="contradict each other about replicas"):
        read_step(store, name_of(100, attempt)).check()
