"""Regions of constants, attacked on the keeper's side."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashckpt.format import metadata
from flashckpt.format.layout import SlotImage
from tests.keeper.driver import eventually
from tests.keeper.fake import FakeTrainer, constants_for


@pytest.mark.parametrize("persist", [True, False], ids=["persisted", "audited"])
def test_of_the_constants_only_those_that_differ_are_named(
    tmp_path: Path, runtime: Path, persist: bool
) -> None:
    trainer = FakeTrainer(tmp_path / "run", runtime, kib=16, constants_kib=16)
    trainer.start()
    trainer.take_slots()
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
    assert (kinds(trainer), trainer.region_kind) == ({"memfd"}, "memfd")
    trainer.snapshot(1, persist=True)
    trainer.wait_committed(1)
    trainer.end()


@pytest.mark.usefixtures("runtime")
def test_named_slots_of_before_are_not_given_beside_a_region_without_a_name(
    tmp_path: Path, small_disk: Path
) -> None:
    """They would be found without it, once all processes are dead."""
    first = FakeTrainer(tmp_path / "run", small_disk, kib=16)
    first.start()
    first.take_slots()
    assert kinds(first) == {"named"}
    first.snapshot(1, persist=True)
    first.wait_committed(1)
    first.client.release([slot.name for slot in first.slots])
    first.constants = constants_for(9000)
    first.image = SlotImage(first.layout, first.constants)
    first.take_slots()
    assert (kinds(first), first.region_kind) == ({"memfd"}, "memfd")
    first.snapshot(2, persist=True)
    first.wait_committed(2)
    first.end()
