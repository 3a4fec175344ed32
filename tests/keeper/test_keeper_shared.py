"""The region of constants that slots name: how long it stays, who gets it again, what it gives."""

import contextlib
import os
from pathlib import Path

import pytest

from flashckpt.errors import KeeperError
from flashckpt.format.names import AttemptName
from flashckpt.memory.runtime import RuntimeFolder
from flashckpt.memory.slot import SlotState
from tests.keeper.driver import (
    Process,
    begun_process,
    committed,
    ended,
    eventually,
    kill_keeper,
    runtime_of,
    saved,
    the_keeper,
)
from tests.keeper.fake import FakeTrainer, keeper_pid
from tests.keeper.test_keeper_constants import attached
from tests.memory.mounts import small_tmpfs

MIB = 1 << 20


def regions(folder: RuntimeFolder) -> list[str]:
    """Names of the constants regions that are in memory."""
    return [name for name in folder.names() if name.startswith("constants-")]


def opened(pid: int) -> set[str]:
    """What a process has open."""
    links = set[str]()
    for each in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            links.add(os.readlink(each.path))
    return links


def held_memfds(pid: int, start: str) -> int:
    """How many memfds whose name begins so a process holds."""
    return sum(link.startswith(f"/memfd:{start}") for link in opened(pid))


def swept(folder: RuntimeFolder) -> None:
    """Wait until the keeper has let go of all that it can: it removes locks of dead trainers more seldom."""
    lock = Path(folder.path) / "trainer-00000-0-00000000.lock"
    for _ in range(2):
        lock.touch(mode=0o600)
        eventually(lambda: not lock.exists())


def process(run: Path, base: Path) -> Process:
    """A trainer that may be killed, with slots and a region that these name."""
    return begun_process(run, base, constants_kib=64, keep=20)


def test_a_region_that_an_attempt_took_over_is_its_own(run: Path, runtime: Path) -> None:
    """Its first snapshots have no constants, and settle what the attempt before left."""
    first = process(run, runtime)
    folder = runtime_of(run, runtime)
    first.save(1)
    [name] = regions(folder)
    first.kill()
    second = FakeTrainer(run, runtime, constants_kib=64, keep=20)
    second.start(AttemptName.parse(first.attempt), 1)
    second.keep_region(name)
    image = second.image
    second.without_constants()
    second.take_slots()
    saved(second, 2, 3, 4)
    assert second.region is not None
    assert not any(sealed.record.constants_nonce for slot in second.slots if (sealed := slot.sealed()))
    swept(folder)
    assert regions(folder) == [name], "nothing names it yet, and its trainer lives"
    second.image = image
    saved(second, 5)
    assert committed(run) == [1, 2, 3, 4, 5]
    second.end()
    eventually(lambda: not os.path.exists(folder.path))


def test_a_region_that_is_gone_is_not_granted_by_name(run: Path, runtime: Path) -> None:
    trainer = attached(run, runtime)
    with pytest.raises(KeeperError, match="does not exist any more"):
        trainer.client.keep_constants("constants-00000-00000000000000ff")
    with pytest.raises(KeeperError, match="does not exist any more"):
        trainer.client.keep_constants(trainer.slots[0].name)
    saved(trainer, 1)
    assert committed(trainer.run) == [1]


def test_it_stays_while_a_sealed_snapshot_names_it_and_goes_with_the_last(run: Path, runtime: Path) -> None:
    """Its trainer has let go of it, and goes on without constants."""
    trainer = attached(run, runtime)
    [name] = regions(trainer.folder)
    saved(trainer, 1, 2)
    assert trainer.region is not None
    trainer.client.release([name])
    trainer.region.close()
    trainer.region = None
    trainer.without_constants()
    trainer.take_slots()
    for step in (3, 4, 5):
        pid = keeper_pid(trainer.folder)
        assert regions(trainer.folder) == [name], "the snapshot of step 1 or 2 names it"
        saved(trainer, step)
        names = [slot.sealed().record.constants_nonce for slot in trainer.slots if slot.sealed()]  # type: ignore[union-attr]
        if not any(names):
            break
    assert not any(names)
    eventually(lambda: regions(trainer.folder) == [])
    assert pid is not None
    assert all(name not in link for link in opened(pid))
    assert committed(trainer.run)[:2] == [1, 2]


def test_a_region_that_its_trainer_died_writing_goes(run: Path, runtime: Path) -> None:
    trainer = Process(run, runtime, constants_kib=64)
    trainer.do("start", None, 0, None)
    trainer.do("without constants")
    trainer.do("slots", 3)
    folder = runtime_of(run, runtime)
    trainer.do("snapshot", 1, False)
    trainer.do("begin region")
    [name] = regions(folder)
    with open(Path(folder.path) / name, "rb") as file:
        file.seek(256)
        assert file.read(1)[0] == SlotState.WRITING
    trainer.kill()
    eventually(lambda: regions(folder) == [])
    eventually(lambda: committed(run) == [1])


def test_a_new_keeper_keeps_a_region_that_no_snapshot_names_yet(run: Path, runtime: Path) -> None:
    """Asked for by a trainer that lives, and not filled when the keeper dies."""
    trainer = attached(run, runtime, filled=False)
    grant = trainer.ask_region()
    os.close(grant.descriptor)
    kill_keeper(trainer.folder)
    assert trainer.client.tend()
    saved(trainer, 1)
    assert trainer.ask_region().name == grant.name
    assert regions(trainer.folder) == [grant.name]


def test_a_region_without_a_name_is_let_go_by_a_keeper_when_none_names_it(run: Path, runtime: Path) -> None:
    with small_tmpfs(MIB) as base:
        trainer = attached(run, base, filled=False)
        grant = trainer.ask_region()
        os.close(grant.descriptor)
        pid = the_keeper(trainer.folder)
        assert held_memfds(pid, grant.name) == held_memfds(os.getpid(), grant.name) == 1
        trainer.client.release([grant.name])
        eventually(lambda: held_memfds(pid, grant.name) == 0)
        # By its name: other tests may have left regions of theirs in this process.
        assert held_memfds(os.getpid(), grant.name) == 0
        saved(trainer, 1)
        assert committed(trainer.run) == [1]
        ended(trainer)
