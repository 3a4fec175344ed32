"""Constants that slots share, attacked on the keeper's side."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashckpt.errors import KeeperError
from flashckpt.format import metadata
from flashckpt.memory.control_page import SlotSize
from flashckpt.memory.held_regions import Regions
from flashckpt.memory.region import NAMED
from tests.keeper.driver import eventually
from tests.keeper.fake import FakeTrainer


@pytest.mark.parametrize("persist", [True, False], ids=["persisted", "audited"])
def test_of_the_constants_only_those_that_differ_are_named(
    tmp_path: Path, runtime: Path, persist: bool
) -> None:
    trainer = FakeTrainer(tmp_path / "run", runtime, kib=16, constants_kib=16)
    trainer.start()
    trainer.take_slots()
    trainer.share()
    slot, generation = trainer.write(1) or pytest.fail("no slot")
    names = [leaf.name for leaf in trainer.image.leaves]
    changed = names.index("base.scale")
    place = metadata.geometry(*trainer.sizes()).table + 8 * changed
    slot.metadata_view[place : place + 8] = bytes(8)
    if persist:
        slot.request_persist(generation)
    trainer.seal(slot, generation)
    eventually(lambda: slot.torn[0] == generation)
    assert slot.torn[1] == (changed,)
    trainer.end()


def kinds(trainer: FakeTrainer) -> set[str]:
    return {grant.kind for grant in trainer.grants}


@pytest.mark.usefixtures("runtime")
def test_slots_do_not_outlive_the_region_that_they_name(tmp_path: Path, small_disk: Path) -> None:
    """Small ones would have room where the region has none, and be found without it."""
    trainer = FakeTrainer(tmp_path / "run", small_disk, kib=16, constants_kib=9000)
    trainer.start()
    trainer.take_slots()
    trainer.share()
    assert (kinds(trainer), trainer.region_kind) == ({"memfd"}, "memfd")
    trainer.shrink()
    assert kinds(trainer) == {"memfd"}
    trainer.snapshot(1, persist=True)
    trainer.wait_committed(1)
    trainer.end()


@pytest.mark.usefixtures("runtime")
def test_a_region_that_would_not_live_as_long_as_slots_is_not_even_made(
    tmp_path: Path, small_disk: Path
) -> None:
    """It is asked for every minute: gigabytes must not be taken and let go of each time."""
    trainer = FakeTrainer(tmp_path / "run", small_disk, kib=1000)
    trainer.start()
    trainer.take_slots()
    assert kinds(trainer) == {"named"}
    with pytest.raises(KeeperError, match="no room for them where the slots are"):
        eventually(lambda: trainer.client.constants(SlotSize(4096, 9 << 20)))
    begun: list[int] = []
    made = Regions(trainer.folder, trainer.life).make(
        0, [0], SlotSize(4096, 9 << 20), begun=begun.append, holds_constants=True, only=NAMED
    )
    assert (made.regions, begun) == ((), [])
    assert isinstance(made.error, KeeperError)
    trainer.snapshot(1, persist=True)
    trainer.wait_committed(1)
    trainer.end()
