"""A region of constants that is damaged, gone or another one: nothing wrong is committed, and it is said."""

import os
import signal
from pathlib import Path

import pytest

from flashckpt.format import metadata
from flashckpt.format.layout import SlotImage
from flashckpt.format.names import AttemptName
from flashckpt.memory.runtime import RuntimeFolder
from flashckpt.memory.slot import Slot, SlotState
from flashckpt.persist.job import JobState
from tests.events import ledger
from tests.folders import flip
from tests.keeper.driver import (
    Process,
    begun,
    committed,
    eventually,
    kill_keeper,
    runtime_of,
    saved,
    the_keeper,
)
from tests.keeper.fake import FakeTrainer, constants_for, content, keeper_pid
from tests.keeper.jobs import Persister
from tests.keeper.region import write_constants
from tests.keeper.test_keeper_constants import alone as alone
from tests.keeper.test_keeper_constants import attached, files, flip_constant, order
from tests.keeper.test_keeper_shared import process, regions


def last_error(run: Path) -> str:
    errors = [line for line in ledger(run) if line["event"] == "error"]
    return str(errors[-1]["message"]) if errors else ""


def left(run: Path, base: Path) -> tuple[str, str, RuntimeFolder]:
    """Both are killed with step 7 in memory and nowhere else. Returns its attempt and its slot's name."""
    first, folder = process(run, base), runtime_of(run, base)
    pid = the_keeper(folder)
    os.kill(pid, signal.SIGSTOP)
    slot, _ = first.do("snapshot", 7, False)
    first.kill()
    kill_keeper(folder)
    return first.attempt, slot, folder


def test_a_flipped_byte_is_never_written(run: Path, runtime: Path) -> None:
    trainer = attached(run, runtime)
    flip_constant(trainer)
    slot, generation = trainer.snapshot(1, persist=True)
    eventually(lambda: slot.torn[0] == generation)
    [line] = eventually(lambda: [line for line in ledger(trainer.run) if line["event"] == "torn"])
    assert line["leaves"] == ["base.weight"]
    assert [trainer.image.leaves[index].name for index in slot.torn[1]] == ["base.weight"]
    assert slot.state().state is SlotState.FREE
    assert files(trainer) == []
    assert not list(trainer.run.glob("data/*/*/*"))
    # With a region that is whole the run goes on.
    trainer.fill_region()
    saved(trainer, 2)
    assert committed(trainer.run) == [2]


def test_other_constants_under_the_name_are_refused(run: Path, runtime: Path) -> None:
    """The same leaves at the same places, other bytes: sound in itself, and not what the snapshot had."""
    attempt, slot, folder = left(run, runtime)
    [name] = regions(folder)
    region = Slot.open(os.open(Path(folder.path) / name, os.O_RDWR), map_image=True)
    layout = constants_for(64)
    assert layout is not None
    assert region.free(region.state())
    data = [content(leaf, 0)[::-1] for leaf in layout.leaves]
    write_constants(region, 1, AttemptName.parse(attempt), layout, data)  # type: ignore[arg-type]
    region.close()
    FakeTrainer(run, runtime, constants_kib=64, keep=20)
    [line] = eventually(lambda: [line for line in ledger(run) if line["event"] == "torn"])
    assert line["leaves"] == [leaf.name for leaf in layout.leaves]
    assert line["slot"] == slot
    assert committed(run) == []
    assert not list(run.glob("data/*/*/frozen-*"))
    # Nothing names it now, and who had it is dead.
    eventually(lambda: regions(folder) == [])


def test_a_region_that_is_not_sealed_is_not_read(alone: FakeTrainer) -> None:
    """Its bytes may be right by chance; who wrote them has not said that they are."""
    region = alone.region
    assert region is not None
    asked = order(alone, 1)
    assert region.free(region.state())
    outcome = Persister(alone.store, "0123abcd").persist(asked)
    assert outcome.state is JobState.TORN
    assert [name for _, name in outcome.leaves] == ["base.weight", "base.scale"]
    assert files(alone) == []
    alone.region = None
    region.close()


@pytest.mark.parametrize("damage", ["page", "record", "metadata"])
def test_a_damaged_region_costs_what_names_it_and_no_keeper(run: Path, runtime: Path, damage: str) -> None:
    _, slot, folder = left(run, runtime)
    [name] = regions(folder)
    flip(Path(folder.path) / name, {"page": 40, "record": 800, "metadata": 4096 + 70}[damage])
    second = FakeTrainer(run, runtime, constants_kib=64, keep=20)
    if damage == "page":
        # No region of ours any more: left where it is, as if there were none.
        eventually(lambda: "are not in this node's memory" in last_error(run))
        assert regions(folder) == [name]
    else:
        [line] = eventually(lambda: [line for line in ledger(run) if line["event"] == "torn"])
        assert line["leaves"] == ["base.weight", "base.scale"]
    pid = keeper_pid(folder)
    second.start()
    second.take_slots()
    saved(second, 8)
    assert committed(run) == [8]
    assert keeper_pid(folder) == pid


def test_no_keeper_waits_for_ever_for_a_region_that_is_gone(run: Path, runtime: Path) -> None:
    _, slot, folder = left(run, runtime)
    [name] = regions(folder)
    os.unlink(Path(folder.path) / name)
    second = Process(run, runtime, constants_kib=64, linger_s=0.1)
    eventually(lambda: "are not in this node's memory" in last_error(run))
    second.kill()
    eventually(lambda: keeper_pid(folder) is None)
    assert slot in folder.names(), "it is not for a keeper to say that nobody has the region"
    assert committed(run) == []


@pytest.mark.every_set
@pytest.mark.parametrize("persist", [True, False], ids=["persisted", "audited"])
def test_of_the_constants_only_those_that_differ_are_named(run: Path, runtime: Path, persist: bool) -> None:
    trainer = begun(run, runtime, kib=16, constants_kib=16)
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


def kinds(trainer: FakeTrainer) -> set[str]:
    return {grant.kind for grant in trainer.grants}


@pytest.mark.usefixtures("runtime")
def test_slots_do_not_outlive_the_region_that_they_name(run: Path, small_disk: Path) -> None:
    """Small ones would have room where the region has none, and be found without it."""
    trainer = begun(run, small_disk, kib=16, constants_kib=9000)
    assert (kinds(trainer), trainer.region_kind) == ({"memfd"}, "memfd")
    saved(trainer, 1)
    trainer.end()


@pytest.mark.usefixtures("runtime")
def test_named_slots_of_before_are_not_given_beside_a_region_without_a_name(
    run: Path, small_disk: Path
) -> None:
    """They would be found without it, once all processes are dead."""
    first = begun(run, small_disk, kib=16)
    assert kinds(first) == {"named"}
    saved(first, 1)
    first.client.release([slot.name for slot in first.slots])
    first.constants = constants_for(9000)
    first.image = SlotImage(first.layout, first.constants)
    first.take_slots()
    assert (kinds(first), first.region_kind) == ({"memfd"}, "memfd")
    saved(first, 2)
    first.end()
