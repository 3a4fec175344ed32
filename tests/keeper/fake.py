"""A trainer without torch: it has slots from a real keeper, fills them natively and has them sealed.

Used in this process, and as a program of its own that is driven line by line and killed.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

from flashckpt import _native
from flashckpt.catalogue.changes import is_visible
from flashckpt.commit import attempts
from flashckpt.commit.steps import read_step
from flashckpt.commit.verification import verify_file
from flashckpt.commit.view import View, open_run
from flashckpt.format import metadata
from flashckpt.format.layout import NO_LEAVES, Layout, Leaf, SlotImage
from flashckpt.format.names import AttemptName, CommitName, SnapshotId
from flashckpt.keeper.client import KeeperClient, SlotGrant
from flashckpt.memory.cache_folder import CachePlace
from flashckpt.memory.region import SlotSize
from flashckpt.memory.runtime import (
    LifeLock,
    RuntimeFolder,
    enter,
    identity_of,
    trainer_lock_name,
)
from flashckpt.memory.slot import Slot, SlotRing, SlotState, Word
from flashckpt.options import Keep, Remote
from flashckpt.persist.audit import audit
from flashckpt.persist.job import SealedSnapshot
from flashckpt.store import open_store
from tests import run_view
from tests.descriptors import closed_after
from tests.keeper.region import record_of, write_constants, write_metadata

VALUES = b'{"step":1}'


def layout_for(kib: int) -> Layout:
    """A small state of two dtypes, with an odd size and an empty leaf."""
    return Layout.of(
        [
            Leaf(name="model.weight", dtype="float32", shape=(kib, 256)),
            Leaf(name="model.bias", dtype="float32", shape=(7,)),
            Leaf(name="model.mask", dtype="uint8", shape=(13,)),
            Leaf(name="model.none", dtype="float32", shape=(0,)),
        ]
    )


def constants_for(kib: int) -> Layout:
    """What never changes, of two dtypes: none for 0."""
    if not kib:
        return NO_LEAVES
    return Layout.of(
        [
            Leaf(name="base.weight", dtype="float32", shape=(kib, 256)),
            Leaf(name="base.scale", dtype="bfloat16", shape=(9,)),
        ]
    )


def content(leaf: Leaf, step: int) -> bytes:
    """The bytes of a leaf at a step: every step differs from every other in every leaf but the constants."""
    unit = f"{leaf.name}@{0 if leaf.name.startswith('base.') else step};".encode()
    return (unit * (leaf.num_bytes // len(unit) + 1))[: leaf.num_bytes]


def open_runtime(run: Path, base: Path) -> tuple[Any, str]:
    store = open_store(str(run))
    made = open_run(store, create=True)
    return store, identity_of(made.run_id, store.place())


class FakeTrainer:
    boundary: int | None = None
    """That of the next snapshots, where it is not their step."""

    def __init__(
        self, run: Path, base: Path, *, kib: int = 256, constants_kib: int = 0, keep: int = 3,
        linger_s: float = 30.0, timeout_s: float = 30, grace_s: float = 60.0, world: int = 1, rank: int = 0,
        ranks: Sequence[int] = (), join: str = "", remote: Remote | None = None, cache: str = "",
        cache_limit: int = 0,
    ) -> None:  # fmt: skip
        """`join`: the attempt that another rank has named."""
        self.world, self.rank = world, rank
        self.run, self.layout = run, layout_for(kib)
        self.constants = constants_for(constants_kib)
        self.image = SlotImage(self.layout, self.constants)
        self.store, identity = open_runtime(run, base)
        self.folder: RuntimeFolder
        self.life: LifeLock
        self.folder, self.life = enter(str(base), identity, trainer_lock_name(rank))
        closed_after(self.folder)
        self.keep, self.linger_s = Keep(last=keep), linger_s
        joined = AttemptName.parse(join) if join else None
        self.attempt = joined or run_view.next_name(self.store)
        if joined is None:
            attempts.reserve(self.store, self.attempt)
        self.client = KeeperClient(str(run), self.folder, self.life, timeout_s=timeout_s)
        closed_after(self)
        self.client.hello(
            rank=rank, world=world, attempt=str(self.attempt), keep=self.keep, linger_s=linger_s,
            environment={"fake": 1}, ranks=ranks, remote=remote, grace_s=grace_s,
            cache=CachePlace(cache, cache_limit or None) if cache else None,
        )  # fmt: skip
        self.complete = self.attempt.number, 0
        self.sealer = _native.Sealer()
        self.slots: list[Slot] = []
        self.grants: list[SlotGrant] = []
        self.owners: dict[str, int] = {}
        self.region: Slot | None = None
        self.region_kind = ""

    def survivors(self) -> list[tuple[str, int]]:
        found = []
        for grant in self.client.surviving():
            if grant.holds_constants:
                os.close(grant.descriptor)
                continue
            slot = grant.open()
            sealed = slot.sealed()
            found.append((grant.name, sealed.step))
            slot.close()
        return found

    def candidates(self) -> list[tuple[int, int, str, str]]:
        """What this rank can read, every byte of it: (step, number of the attempt, its name, slot or
        nothing), newest first, memory before storage."""
        survived = {}
        for grant in self.client.surviving():
            slot = grant.open(map_image=False)
            sealed = slot.sealed() if not grant.holds_constants else None
            if sealed is not None and self._is_sound(SealedSnapshot(slot, sealed.generation, grant.owner)):
                survived[grant.name] = CommitName(sealed.step, sealed.attempt, sealed.boundary)
            slot.close()
        view = View.of(self.store)
        found = [(each, slot) for slot, each in survived.items() if is_visible(view.catalogue, each.id)]
        found += [(each, "") for each in view.visible() if self._is_whole(each)]
        found.sort(reverse=True)
        return [(each.step, each.attempt.number, str(each.attempt), slot) for each, slot in found]

    def _is_sound(self, snapshot: SealedSnapshot) -> bool:
        """A keeper that pins it, or lets go of it, makes an audit say nothing: then it is asked again."""
        until = time.monotonic() + 240
        while (found := audit(snapshot)) is False and time.monotonic() < until:
            held = snapshot.slot.sealed()
            if held is None or held.generation != snapshot.generation:
                break
        return found is True

    def _is_whole(self, name: CommitName) -> bool:
        files = read_step(self.store, name).files(self.rank)
        return all(verify_file(self.store, path, of)[0] == "ok" for path, of in files)

    def incomplete(self, step: int) -> None:
        """Not all ranks have it: it is not persisted, and in nobody's way."""
        until = time.monotonic() + 240
        for slot in self.slots:
            sealed = slot.sealed()
            if sealed is None or (sealed.attempt, sealed.step) != (self.attempt, step):
                continue
            slot.request_persist(0)
            while not slot.free(Word(SlotState.SEALED, 0, sealed.generation)):
                assert time.monotonic() < until, "the keeper holds what nobody asks for"
                time.sleep(0.001)

    def start(self, parent: AttemptName | None = None, step: int = 0, loaded: str | None = None) -> None:
        resumed = None if parent is None else SnapshotId(parent, step)
        view = View.of(self.store)
        if view.attempt != self.attempt:
            here = attempts.local_owner(self.folder.path, self.life.name)
            run_view.begin_as(view, self.attempt, resumed, step, world=self.world, owner=here)
        if resumed is not None:
            self.complete = resumed.attempt.number, step
        if resumed is not None and loaded is not None:
            self.client.started(resumed)

    def sizes(self) -> tuple[int, int, int]:
        return len(metadata.plan_bytes(self.image)), len(self.image.leaves), len(VALUES)

    def take_slots(self, count: int = 3) -> None:
        if self.image.constants.leaves and self.region is None:
            self.fill_region()
        size = metadata.geometry(*self.sizes()).num_bytes
        self.grants = self.client.slots(count, SlotSize(size, self.layout.num_bytes))
        self.slots = [grant.open() for grant in self.grants]
        self.owners = {grant.name: grant.owner for grant in self.grants}
        self.ring = SlotRing(self.slots)
        if self.world > 1:
            self.ring.begin(self.complete, self.attempt.number)

    # What all slots name

    def ask_region(self) -> SlotGrant:
        return self.client.constants(SlotSize(1 << 16, self.constants.num_bytes))

    def fill_region(self) -> str:
        """Fill a region with the constants: snapshots name it from here on. Returns its name."""
        grant = self.ask_region()
        region = grant.open()
        layout = self.constants
        data = [content(leaf, 0) for leaf in layout.leaves]
        write_constants(region, grant.owner, self.attempt, layout, data)
        return self._names(grant, region)

    def keep_region(self, name: str) -> str:
        """Go on naming a region that survived."""
        grant = self.client.keep_constants(name)
        return self._names(grant, grant.open())

    def _names(self, grant: SlotGrant, region: Slot) -> str:
        self.region, self.region_kind = region, grant.kind
        return grant.name

    def without_constants(self) -> None:
        """Snapshots have none from here on."""
        self.image = SlotImage(self.layout)

    def _region_digests(self) -> array[int]:
        sealed = self.region.sealed()
        assert sealed is not None
        return self.region.metadata(sealed).digests

    def write(self, step: int) -> tuple[Slot, int] | None:
        """Fill a slot with a step, sealed nowhere yet."""
        slot = self.ring.take()
        if slot is None:
            return None
        generation = slot.begin(self.owners[slot.name])
        if generation is None:
            return None
        layout, leaves = self.layout, self.image.leaves
        plan, fixed = metadata.plan_bytes(self.image), self.image.constants
        untaken = [(1 << 64) - 1] * len(leaves)
        places = write_metadata(slot.metadata_view, plan, untaken, VALUES)
        slot.image_view[: layout.data_start] = layout.header
        own = layout.leaves
        data = [bytearray(content(leaf, step)) for leaf in own]
        first = slot.image_address
        _native.copy_digest(
            array("Q", [_native.address_of(each) if each else first for each in data]),
            array("Q", [first + start for start in self.image.starts()[: len(own)]]),
            array("Q", [leaf.num_bytes for leaf in own]),
            slot.metadata_address + places.table,
            1,
        )
        if fixed.leaves:
            table = places.table + 8 * len(own)
            slot.metadata_view[table : places.values] = self._region_digests().tobytes()
        slot.write_record(
            record_of(
                self.attempt, step, generation, layout, places,
                boundary=step if self.boundary is None else self.boundary,
                constants_bytes=fixed.num_bytes,
                constants_nonce=self.region.header.nonce if fixed.leaves and self.region is not None else 0,
            )
        )  # fmt: skip
        return slot, generation

    def seal(self, slot: Slot, generation: int, *, confirms: bool = False) -> None:
        owner = self.owners[slot.name]
        places = metadata.geometry(*self.sizes())
        slot.submit(self.sealer, owner, generation, places, len(self.image.leaves), confirms=confirms)
        assert self.sealer.drain(240)

    def snapshot(self, step: int, *, persist: bool = False, home: bool = True) -> tuple[Slot, int]:
        """Write and seal a step; waits for a slot."""
        until = time.monotonic() + 240
        while (written := self.write(step)) is None:
            assert time.monotonic() < until, "no slot came free"
            time.sleep(0.005)
        slot, generation = written
        if persist:
            slot.request_persist(generation, home=home)
        self.seal(slot, generation)
        return slot, generation

    def wait_committed(self, step: int, timeout_s: float = 240) -> None:
        self.wait_for(lambda status: step in status.committed, timeout_s)

    def wait_for(self, condition: Any, timeout_s: float = 240) -> Any:
        until = time.monotonic() + timeout_s
        while True:
            status = self.client.status()
            if condition(status):
                return status
            assert time.monotonic() < until, status
            time.sleep(0.01)

    def end(self) -> None:
        """End in order, as a process would: the life lock goes last."""
        self.client.closing()
        self.close()

    def close(self) -> None:
        """Let go of everything, and say nothing: again, too."""
        self.client.close()
        for slot in self.slots:
            slot.close()
        if self.region is not None:
            self.region.close()
        self.sealer.close()
        self.life.release(self.folder)


class Driven:
    """What each command of `main` does with the trainer that it drives. Returns the answer."""

    def __init__(self) -> None:
        self._trainer: FakeTrainer | None = None
        self._pending: tuple[Slot, int] | None = None

    def do(self, command: str, *rest: Any) -> Any:
        """A command of this class, else the trainer's method of that name."""
        name = command.replace(" ", "_")
        own = getattr(self, f"_do_{name}", None)
        return own(*rest) if own else getattr(self._made, name)(*rest)

    @property
    def _made(self) -> FakeTrainer:
        assert self._trainer is not None
        return self._trainer

    def _do_attach(self, run: str, base: str, options: dict[str, Any]) -> str:
        self._trainer = FakeTrainer(Path(run), Path(base), **options)
        return str(self._trainer.attempt)

    def _do_start(self, parent: str, step: Any, boundary: Any) -> None:
        self._made.start(AttemptName.parse(parent) if parent else None, step, boundary)

    def _do_slots(self, *counts: Any) -> list[tuple[str, str]]:
        self._made.take_slots(*counts)
        return [(grant.name, grant.kind) for grant in self._made.grants]

    def _do_ask(self, count: int, constants_bytes: int) -> None:
        size = SlotSize(4096, constants_bytes)
        threading.Thread(target=self._made.client.slots, args=(count, size), daemon=True).start()

    def _do_ask_region(self) -> str:
        return self._made.ask_region().name

    def _do_begin_region(self) -> Any:
        grant = self._made.ask_region()
        return grant.open().begin(grant.owner)

    def _do_snapshot(self, step: int, persist: bool, home: bool = True) -> list[Any]:
        slot, generation = self._made.snapshot(step, persist=persist, home=home)
        return [slot.name, generation]

    def _do_write(self, step: int) -> list[Any]:
        self._pending = self._made.write(step)
        slot, generation = self._pending
        return [slot.name, generation]

    def _do_leave_unconfirmed(self, step: int) -> list[Any]:
        """Written, asked for, complete, and not confirmed."""
        answer = self._do_write(step)
        slot, generation = self._pending
        slot.request_persist(generation)
        self._made.seal(slot, generation, confirms=True)
        return answer

    def _do_confirm(self) -> bool:
        slot, generation = self._pending
        return slot.confirm(self._made.sealer, slot.state().owner, generation)

    def _do_seal(self) -> None:
        assert self._pending is not None
        self._made.seal(*self._pending)

    def _do_try(self, step: int, persist: bool) -> bool:
        found = self._made.write(step)
        if found is not None:
            if persist:
                found[0].request_persist(found[1])
            self._made.seal(*found)
        return found is not None

    def _do_complete(self, *words: Any) -> None:
        self._made.ring.set_complete(*words)

    def _do_committed(self, step: int) -> None:
        self._made.wait_committed(step)

    def _do_status(self) -> Any:
        return self._made.client.status().to_dict()

    def _do_tend(self) -> Any:
        return self._made.client.tend()


def main(lines: Iterable[str], out: TextIO = sys.stdout) -> None:
    """Commands on stdin, one JSON list a line; each is answered when it is done."""
    driven = Driven()
    for line in lines:
        print(json.dumps(driven.do(*json.loads(line))), file=out, flush=True)


def keeper_pid(folder: RuntimeFolder) -> int | None:
    """The process that holds the election, by the lock itself."""
    import fcntl
    import struct

    try:
        descriptor = folder.open_file("keeper.lock")
    except FileNotFoundError:
        return None
    try:
        asked = struct.pack("@hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0)
        kind, _, _, _, pid = struct.unpack("@hhqqi4x", fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
        return None if kind == fcntl.F_UNLCK else pid
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    main(sys.stdin)
