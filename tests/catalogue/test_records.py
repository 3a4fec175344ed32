"""The records of the catalogue: their bytes and names. Records that contradict themselves: tests/hostile/."""

from dataclasses import replace

import pytest

from flashckpt.format.catalogue import (
    Catalogue,
    Checkpoint,
    Folder,
    folders_of,
    parse_version,
    version_path,
)
from flashckpt.format.manifest import (
    File,
    FrozenFile,
    Manifest,
    PartFile,
    part_name,
)
from flashckpt.format.names import AttemptName, SnapshotId
from flashckpt.format.owner import Owner

A, B = AttemptName(1, "7fa3c1d2"), AttemptName(2, "0badcafe")
ID, PARENT = SnapshotId(B, 7 << 24), SnapshotId(A, 3)
BASE = Folder(A, PARENT)
FROZEN = FrozenFile(BASE, "frozen-00001-5f2c.safetensors", 512)
MANIFEST = Manifest(
    folder=Folder(B, ID),
    step=7,
    world=2,
    run_id="5eed" * 4,
    lineage=(PARENT,),
    parts=(PartFile(part_name(0, "5f2c"), 700, (0, 1)),),
    shards=(File("rank-00000-5f2c.safetensors", 4096), File("rank-00001-5f2c.safetensors", 4096)),
    frozen=(FROZEN,),
)
CATALOGUE = Catalogue(
    run_id="5eed" * 4,
    version=42,
    writer=B,
    attempt=B,
    ended=False,
    failed_starts=2,
    committed=ID,
    checkpoints=(
        Checkpoint(id=PARENT, step=3, writer=A, manifest="5f2c", num_bytes=9, bases=frozenset({BASE})),
        Checkpoint(id=ID, step=7, writer=B, manifest="5f2d", bases=frozenset({BASE, Folder(B, ID)})),
    ),
    lineages=((A, ()), (B, (PARENT,))),
    foreign=frozenset({AttemptName(3, "11111111")}),
    damaged=((PARENT, "host: two reads differ"),),
    owner=Owner(boot_id="b", runtime="/r", runtime_id="1:2", lock="l", host="h", pid=3, job_id="j"),
    parent_step=3,
)


def test_names() -> None:
    run = "5eed" * 4
    assert CATALOGUE.path == version_path(42, run) == f"catalogue/000000042-{run}"
    assert version_path(1, run) == "catalogue/000000001"
    texts = (
        f"000000042-{run}",
        "000000001",
        "000000042",
        f"000000001-{run}",
        f".000000042-{run}.tmp",
        f"42-{run}",
    )
    assert [parse_version(each) for each in texts] == [(42, run), (1, ""), None, None, None, None]
    folder = Folder(B, ID)
    assert folder.path == "data/000002-0badcafe/000002-0badcafe.00000000000117440512"
    assert Folder.parse(B, folder.name) == folder
    bad = ["000002-0badcafe.117440512", f"{folder.name}\n", "..", f"000000-0badcafe.{0:020d}"]
    names = [*bad, folder.name, Folder(B, PARENT).name]
    assert folders_of(B, names) == [Folder(B, PARENT), folder]
    with pytest.raises(ValueError, match="out of range"):
        version_path(0, run)


def test_ten_thousand_checkpoints_are_small() -> None:
    def made(n: int) -> Checkpoint:
        id, bases = SnapshotId(A, n << 24), frozenset({BASE})
        return Checkpoint(id=id, step=n, writer=A, manifest="5f2c0a1b", num_bytes=1 << 40, bases=bases)

    checkpoints = tuple(map(made, range(10_000)))
    catalogue = replace(CATALOGUE, checkpoints=checkpoints, lineages=((A, ()), (B, ())), damaged=())
    data = catalogue.to_bytes()
    assert len(data) < 2_000_000
    assert Catalogue.from_bytes(data, "file") == catalogue
