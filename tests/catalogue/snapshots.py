"""Snapshots of a real store: files of a few bytes, and the parts that name them. And what a run must look
like."""

import secrets

from flashckpt.catalogue.changes import visible
from flashckpt.catalogue.home import Home
from flashckpt.catalogue.requests import Stores
from flashckpt.format.catalogue import DATA, Catalogue, Checkpoint, Folder
from flashckpt.format.manifest import File, FrozenFile, Manifest, PartHead, RankFiles, part_name
from flashckpt.format.names import SnapshotId
from flashckpt.options import Keep
from flashckpt.store.base import Store, write_once
from tests.catalogue.processes import start_in

RUN = "5eed" * 4
HOME = Home("home")


def nonce() -> str:
    return secrets.token_hex(4)


class Job:
    """The writer of a run in a store: it starts, and saves snapshots as keepers and their leader do."""

    def __init__(self, store: Store) -> None:
        self.store, self.run = store, Stores({HOME.store: store}).run
        self.catalogue = self.run(start_in(HOME, RUN, nonce()))
        self.name = self.catalogue.writer

    def write(
        self, id: SnapshotId, ranks: tuple[int, ...] = (0,), world: int = 1, frozen: FrozenFile | None = None
    ) -> None:
        """What a keeper does: the shards of its ranks, and its part."""
        write_part(self.store, Folder(self.name, id), ranks, world, frozen)

    def commit(self, id: SnapshotId, keep: Keep) -> Checkpoint | None:
        """What a leader does once all parts are there. None if they are not, or if another has taken over."""
        manifest = self.run(HOME.gather(Folder(self.name, id)))
        if not isinstance(manifest, Manifest):
            return None
        made = self.run(HOME.publish(self.catalogue, manifest))
        self.catalogue = self.run(HOME.commit(self.catalogue, self.name, made, keep))
        return made if self.catalogue.has(id) else None

    def save(self, boundary: int, keep: Keep | None = None, frozen: FrozenFile | None = None) -> Checkpoint:
        id = SnapshotId(self.name, boundary)
        self.write(id, frozen=frozen)
        made = self.commit(id, keep or Keep(last=2))
        assert made is not None
        self.run(HOME.collect(self.catalogue))
        self.run(HOME.trim(self.catalogue))
        return made


def write_part(
    store: Store, folder: Folder, ranks: tuple[int, ...], world: int, frozen: FrozenFile | None = None
) -> tuple[str, PartHead]:
    """Write the shards of some ranks, and their part. Returns its name and head."""
    tag, files = nonce(), []
    if frozen is not None and frozen.base == folder:
        write_once(store, f"{folder.path}/{frozen.name}", b"f" * frozen.num_bytes)
    for rank in ranks:
        shard = File(f"rank-{rank:05d}-{tag}.safetensors", 10 + rank)
        write_once(store, f"{folder.path}/{shard.name}", b"s" * shard.num_bytes)
        files.append(RankFiles(rank, shard, frozen))
    head = PartHead(id=folder.id, step=folder.id.boundary, world=world, node=min(ranks), ranks=tuple(files))
    name = part_name(min(ranks), tag)
    write_once(store, f"{folder.path}/{name}", head.to_bytes())
    return name, head


def faults(store: Store, *, is_collected: bool = True) -> list[str]:
    """What is wrong with a run: checkpoints that are not whole, and, where garbage was collected, files that
    nothing names."""
    run = Stores({HOME.store: store}).run
    catalogue = run(HOME.newest())
    found = [f"{each.id} is not whole" for each in catalogue.checkpoints if not run(HOME.is_whole(each))]
    kept = {each.folder.path for each in catalogue.checkpoints}
    bases = {base.path for each in catalogue.checkpoints for base in each.bases}
    for path in files_of(store, DATA) if is_collected else ():
        folder, _, name = path.rpartition("/")
        if folder not in kept and not (folder in bases and name.startswith("frozen-")):
            found.append(f"{path} is left")
    return found


def files_of(store: Store, folder: str) -> list[str]:
    """The paths of all files below a folder."""
    found = []
    for each in store.list(folder):
        path = f"{folder}/{each.name}"
        found += files_of(store, path) if each.is_folder else [path]
    return found


def boundaries(catalogue: Catalogue) -> list[int]:
    return [each.id.boundary for each in visible(catalogue)]
