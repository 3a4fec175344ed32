"""A fork between the closing of a descriptor and what comes after it: the child leaves alone what has the
number by then."""

import os
from collections.abc import Callable

import pytest

from flashckpt.checkpointer.session import Stacks
from flashckpt.keeper.client import HeldDescriptors
from flashckpt.memory.runtime import RuntimeFolder
from flashckpt.memory.slot import Slot
from tests.descriptors import closed_after
from tests.memory.test_slot import make


def a_slot(folder: RuntimeFolder) -> tuple[int, Callable[[], object]]:
    slot = make()
    return slot.descriptor, slot.close


def a_folder(folder: RuntimeFolder) -> tuple[int, Callable[[], object]]:
    other = closed_after(RuntimeFolder.at(folder.path))
    return other.descriptor, other.close


def held_descriptors(folder: RuntimeFolder) -> tuple[int, Callable[[], object]]:
    held, slot = HeldDescriptors(), closed_after(make())
    held.keep({slot.name: slot.descriptor})
    return held.held[slot.name], held.close


def a_stacks_file(folder: RuntimeFolder) -> tuple[int, Callable[[], object]]:
    stacks = Stacks.open(folder, "trainer-00000-1-e.lock")
    return stacks._descriptor, lambda: stacks.close(folder)


@pytest.mark.parametrize("made", [a_slot, a_folder, held_descriptors, a_stacks_file])
def test_a_child_closes_no_number_of_anothers(
    made: Callable[[RuntimeFolder], tuple[int, Callable[[], object]]],
    folder: RuntimeFolder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    descriptor, close = made(folder)
    closed, statuses = os.close, []

    def closed_and_forked(number: int) -> None:
        """As another thread may do: it opens a file, then forks."""
        closed(number)
        if number != descriptor or statuses:
            return
        foreign = os.open("/dev/zero", os.O_RDONLY)
        if foreign != descriptor:
            os.dup2(foreign, descriptor)
            closed(foreign)
        child = os.fork()
        if child == 0:
            os._exit(0 if os.path.exists(f"/proc/self/fd/{descriptor}") else 1)
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        closed(descriptor)

    monkeypatch.setattr(os, "close", closed_and_forked)
    close()
    monkeypatch.undo()
    assert statuses == [0], "the child closed another's file"


@pytest.mark.process
def test_a_child_closes_no_number_of_a_slot_that_was_never_mapped() -> None:
    """The error keeps what could not be made, and the descriptor is closed."""
    slot = make()
    descriptor = os.open(f"/proc/self/fd/{slot.descriptor}", os.O_RDONLY)
    with pytest.raises(OSError, match="map") as refused:
        Slot.open(descriptor, map_image=True)
    foreign = os.open("/dev/null", os.O_RDONLY)
    assert foreign == descriptor
    child = os.fork()
    if child == 0:
        os._exit(0 if os.path.exists(f"/proc/self/fd/{foreign}") else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, f"closed in the child, after {refused}"
    os.close(foreign)
    slot.close()
