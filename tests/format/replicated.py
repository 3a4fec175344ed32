"""Parts of ranks with replicas, made in memory without files."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from flashckpt.format.catalogue import Folder
from flashckpt.format.layout import DTYPES, Leaf, Replicas, ranks_of
from flashckpt.format.manifest import frozen_name, shard_name
from flashckpt.format.names import AttemptName, SnapshotId
from flashckpt.format.records import Contents, Part, RankRecord
from tests.format.test_records import contents

ATTEMPT = AttemptName(2, "7fa3c1d2")
ID = SnapshotId(ATTEMPT, 3)
SHARED = [
    Leaf(name="model.weight", dtype="float32", shape=(4, 2), stride=(1, 4)),
    Leaf(name="model.tied", dtype="float32", shape=(3,), aliases=("model.head",)),
    Leaf(name="optimizer.step", dtype="float32", shape=()),
    Leaf(name="model.rows", dtype="int64", shape=(1, 3), box=None),
]


def in_order(leaves: Sequence[Leaf]) -> list[Leaf]:
    return sorted(leaves, key=lambda leaf: (-DTYPES[leaf.dtype][0], leaf.name))


def table(
    members: Sequence[int],
    writers: Mapping[str, int | None],
    digests: Mapping[str, int] | None = None,
    leaves: Sequence[Leaf] = SHARED,
) -> Replicas:
    """Replicas of `members`. Each of them writes the leaves that are not in `writers`."""
    ordered = in_order(leaves)
    return Replicas(
        ranks=ranks_of(members),
        leaves=tuple(replace(leaf, offset=-1) for leaf in ordered),
        digests=tuple((digests or {}).get(leaf.name, 7 + place) for place, leaf in enumerate(ordered)),
        writers=tuple(writers.get(leaf.name) for leaf in ordered),
    )


def rank_of(rank: int, *tables: Replicas, frozen: Sequence[str] = ()) -> RankRecord:
    """A rank with its own buffer and its share of `tables`, with the leaves `frozen` in its constants."""
    own = {leaf: digest for each in tables for leaf, digest, by in each.rows() if by in (None, rank)}
    constants = {leaf: digest for leaf, digest in own.items() if leaf.name in frozen}
    shard = {leaf: digest for leaf, digest in own.items() if leaf.name not in frozen}
    shard[Leaf(name="model.buffer", dtype="uint8", shape=(3,))] = rank
    return RankRecord(
        rank=rank,
        shard=_contents(shard_name(rank, "5f2c0a1b"), shard),
        values={"rank": rank},
        constants=_contents(frozen_name(rank, "5f2c"), constants) if constants else None,
        base=Folder(ATTEMPT, ID) if constants else None,
        replicas=tables,
    )


def _contents(file: str, leaves: Mapping[Leaf, int]) -> Contents:
    found = contents(file, list(leaves))
    by_name = {leaf.name: digest for leaf, digest in leaves.items()}
    return replace(found, digests=tuple(by_name[leaf.name] for leaf in found.leaves))


def part_of(*ranks: RankRecord, world: int) -> Part:
    node = min(each.rank for each in ranks)
    return Part(id=ID, step=100, world=world, node=node, ranks=ranks)
