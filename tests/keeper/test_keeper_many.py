"""More regions than one keeper holds, or than one message carries: no keeper ends of it, and none is lost."""

import os
import threading
from pathlib import Path

import pytest

from flashckpt.errors import KeeperError
from flashckpt.keeper import client
from flashckpt.keeper.client import HeldDescriptors
from flashckpt.keeper.protocol import close_all
from flashckpt.memory.held_regions import MAX_REGIONS
from flashckpt.memory.region import SlotSize, is_region_name
from tests.keeper.driver import begun, committed, kill_keeper, saved
from tests.keeper.fake import FakeTrainer, keeper_pid

MOST = 16


def grown(trainer: FakeTrainer, image_bytes: int) -> None:
    """Slots that are larger than all before, of which none is released."""
    grants = trainer.client.slots(MOST, SlotSize(4096, image_bytes), have=slot_files(trainer))
    assert len(grants) == MOST
    close_all([grant.descriptor for grant in grants])


def slot_files(trainer: FakeTrainer) -> list[str]:
    return [name for name in trainer.folder.names() if name.startswith("slot-")]


def region_files(trainer: FakeTrainer) -> int:
    return sum(map(is_region_name, trainer.folder.names()))


def one_more(trainer: FakeTrainer, what: str) -> None:
    if what == "slots":
        trainer.client.slots(2, SlotSize(4096, 50 << 12), have=slot_files(trainer))
    else:
        trainer.ask_region()


@pytest.mark.parametrize("what", ["slots", "constants"])
def test_a_keeper_does_not_end_of_more_than_it_holds(run: Path, runtime: Path, what: str) -> None:
    trainer = begun(run, runtime, kib=4, constants_kib=4, slots=3)
    pid = keeper_pid(trainer.folder)
    for larger in range(MAX_REGIONS // MOST - 1):
        grown(trainer, (16 + larger) << 12)
    left = MAX_REGIONS - region_files(trainer)
    grants = trainer.client.slots(left, SlotSize(4096, 40 << 12), have=slot_files(trainer))
    close_all([grant.descriptor for grant in grants])
    assert region_files(trainer) == MAX_REGIONS
    with pytest.raises(KeeperError, match=f"already holds {MAX_REGIONS}"):
        one_more(trainer, what)
    assert region_files(trainer) == MAX_REGIONS, "nothing is left of what it could not take"
    saved(trainer, 1)
    assert committed(trainer.run) == [1]
    assert keeper_pid(trainer.folder) == pid


@pytest.mark.usefixtures("runtime")
def test_memfds_are_handed_over_in_several_messages(
    run: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message carries 250 descriptors at most; here five. A new keeper has them from the trainer alone."""
    monkeypatch.setattr(client, "MAX_DESCRIPTORS", 5)
    trainer = begun(run, small_disk, slots=MOST, kib=16, constants_kib=9000)
    grown(trainer, 12 << 20)
    assert {trainer.region_kind, *(grant.kind for grant in trainer.grants)} == {"memfd"}
    held = trainer.client._held.nameless()
    close_all(held)
    assert len(held) == 2 * MOST + 1
    kill_keeper(trainer.folder)
    assert trainer.client.tend()
    saved(trainer, 1)
    assert committed(trainer.run) == [1]
    trainer.end()


def test_what_is_let_go_meanwhile_is_not_handed_over() -> None:
    """Another thread keeps and releases: neither a closed descriptor is given, nor one that is another's."""
    held, region, other = HeldDescriptors(), os.memfd_create("region"), os.memfd_create("other")
    ended = threading.Event()

    def use() -> None:
        turn = 0
        while not ended.is_set():
            turn += 1
            held.keep({f"slot-{turn % 7}": region})
            held.release([f"slot-{(turn + 3) % 7}"])
            os.close(os.dup(other))

    user = threading.Thread(target=use)
    user.start()
    try:
        for _ in range(2000):
            given = held.nameless()
            assert {os.fstat(each).st_ino for each in given} <= {os.fstat(region).st_ino}
            close_all(given)
    finally:
        ended.set()
        user.join()
        held.close()
        close_all([region, other])
