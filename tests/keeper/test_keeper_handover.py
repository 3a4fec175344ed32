"""What a new keeper is told and handed: nothing is lost on the way, and nothing stays that was let go."""

import os
from pathlib import Path

from flashckpt.keeper.protocol import LOG_NAME, close_all
from flashckpt.memory.region import RECORD_OFFSET, SlotSize
from flashckpt.memory.slot import SlotRing
from tests.keeper.driver import begun, committed, ended, eventually, kill_keeper, saved
from tests.memory.mounts import small_tmpfs

MIB = 1 << 20


def test_a_memfd_is_let_go_only_once_a_keeper_has_it(run: Path, runtime: Path) -> None:
    """The state has outgrown its slots, and the keeper is dead when they are given back."""
    with small_tmpfs(MIB) as base:
        trainer = begun(run, base, kib=2048)
        saved(trainer, 1)
        kill_keeper(trainer.folder)
        trainer.snapshot(2, persist=True)
        trainer.client.release([slot.name for slot in trainer.slots])
        for slot in trainer.slots:
            slot.close()
        assert trainer.client._held.held == {}
        eventually(lambda: committed(trainer.run) == [1, 2])
        trainer.slots = []
        ended(trainer)


def test_what_was_released_is_not_taken_for_used_by_the_next_keeper(run: Path, runtime: Path) -> None:
    trainer = begun(run, runtime)
    old = {slot.name for slot in trainer.slots}
    saved(trainer, 1)
    trainer.client.release(sorted(old))
    # The newest stays until a newer one is sealed.
    eventually(lambda: len(old & set(trainer.folder.names())) == 1)
    kill_keeper(trainer.folder)
    for slot in trainer.slots:
        slot.close()
    trainer.grants = trainer.client.slots(3, SlotSize(1 << 16, trainer.layout.num_bytes * 2))
    trainer.slots = [grant.open() for grant in trainer.grants]
    trainer.owners = {grant.name: grant.owner for grant in trainer.grants}
    trainer.ring = SlotRing(trainer.slots)
    saved(trainer, 2)
    assert committed(trainer.run) == [1, 2]
    eventually(lambda: not old & set(trainer.folder.names()))


def test_a_damaged_slot_keeps_no_run_from_a_new_keeper(run: Path, runtime: Path) -> None:
    with small_tmpfs(MIB) as base:
        trainer = begun(run, base, kib=2048)
        saved(trainer, 1)
        slot, _ = trainer.snapshot(2)
        [damaged] = [each for each in trainer.slots if each.state().state.name == "FREE"]
        os.pwrite(damaged.descriptor, b"\xff", 40)
        kill_keeper(trainer.folder)
        assert eventually(trainer.client.tend)
        slot.request_persist(slot.state().generation)
        trainer.wait_committed(2)
        ended(trainer)


def test_nobody_releases_what_another_living_trainer_has(run: Path, runtime: Path) -> None:
    """What was let go is said again to each new keeper: it may be another one's by then."""
    trainer, other = (begun(run, runtime) for _ in range(2))
    names = {slot.name for slot in trainer.slots}
    other.client.release(sorted(names))
    given = other.client.slots(6, SlotSize(4096, 4096), have=[slot.name for slot in other.slots])
    assert len(given) == 3
    assert not names & {grant.name for grant in given}
    assert names <= set(trainer.folder.names())
    close_all([grant.descriptor for grant in given])


def test_a_damaged_slot_that_was_released_goes(run: Path, runtime: Path) -> None:
    """Nobody can use what is in it: it takes up memory until the keeper leaves, otherwise."""
    trainer = begun(run, runtime)
    old, _ = trainer.snapshot(1)
    trainer.snapshot(2)
    os.pwrite(old.descriptor, b"\xff", RECORD_OFFSET + 40)
    trainer.client.release([old.name])
    assert eventually(lambda: old.name not in trainer.folder.names())


def test_the_log_is_bounded_while_a_keeper_lives(run: Path, runtime: Path) -> None:
    """It is in the memory that slots need."""
    trainer = begun(run, runtime)
    log = Path(trainer.folder.path) / LOG_NAME
    with open(log, "ab") as file:
        file.write(b"a line of weeks of a disk that is full\n" * (MIB // 20))
    eventually(lambda: log.stat().st_size < MIB)
    saved(trainer, 1)
    assert log.stat().st_size < MIB
