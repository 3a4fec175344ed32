"""Constants that slots share, attacked on the keeper's side."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashckpt.format import metadata
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
