"""Memory that a step is read into: it is given back at once, and others that map it never touch a hole."""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path

import pytest

from flashckpt.errors import OutOfSpaceError
from flashckpt.memory import memory_budget
from flashckpt.restore.step_image import StepMemory, pages

PAGE = mmap.PAGESIZE


def shared_pages(memory: StepMemory) -> int:
    assert memory.file is not None
    return os.fstat(memory.file.descriptor).st_blocks * 512 // PAGE


def test_what_is_shared_is_mapped_by_others_side_by_side() -> None:
    one, other = StepMemory(1), StepMemory(1)
    [(first, _), (second, start)] = one.share([PAGE + 1, 1])
    [(third, _)] = other.share([PAGE])
    first[:3], second[:3], third[:3] = b"one", b"two", b"3rd"
    assert one.file is not None
    assert other.file is not None
    rows = [(other.file.descriptor, 0, PAGE), (-1, 0, PAGE), (one.file.descriptor, start, PAGE)]
    view = other.mapped([*rows, (one.file.descriptor, 0, 2 * PAGE)])
    assert view.nbytes == 5 * PAGE
    assert [bytes(view[at * PAGE : at * PAGE + 3]) for at in (0, 2, 3)] == [b"3rd", b"two", b"one"]
    view[2 * PAGE : 2 * PAGE + 3] = b"TWO"
    assert bytes(second[:3]) == b"TWO"
    for memory in (one, other):
        memory.discard()
    assert not any(view[:])


def mappings() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:chunks" in line]


def test_it_goes_with_the_last_that_has_it_though_there_are_views() -> None:
    one, other = StepMemory(1), StepMemory(1)
    [(view, start)] = one.share([3 * PAGE])
    [own] = one.take([100])
    assert (shared_pages(one), own.nbytes) == (3, pages(100))
    assert one.file is not None
    theirs = other.mapped([(one.file.descriptor, start, 3 * PAGE)])
    theirs[:], own[:] = bytes([1]) * len(theirs), bytes([1]) * len(own)
    for _ in range(2):
        one.discard()
        assert not any(view)
        assert not any(own)
        assert all(theirs)
    assert len(mappings()) == 1
    other.discard()
    assert not any(theirs)
    assert not mappings()


def test_nobody_can_cut_what_others_have_mapped() -> None:
    memory = StepMemory(1)
    memory.share([2 * PAGE])
    assert memory.file is not None
    assert fcntl.fcntl(memory.file.descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    with pytest.raises(PermissionError):
        os.ftruncate(memory.file.descriptor, PAGE)
    memory.discard()


@pytest.mark.parametrize("rows", [[(0, 1)], [(10_000, 0, PAGE)], [(-1, 0, 0)]])
def test_what_cannot_be_mapped_is_an_error(rows: list[tuple[int, int, int]]) -> None:
    with pytest.raises((OSError, ValueError)):
        StepMemory(1).mapped(rows)


def test_a_part_that_cannot_be_mapped_leaves_nothing_behind() -> None:
    before = len(Path("/proc/self/maps").read_text().splitlines())
    for _ in range(50):
        with pytest.raises(OSError, match="map a part"):
            StepMemory(1).mapped([(-1, 0, PAGE), (10_000, 0, PAGE)])
    assert len(Path("/proc/self/maps").read_text().splitlines()) < before + 25


def test_without_room_nothing_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_budget, "available_bytes", lambda: 2 * PAGE - 1)
    memory = StepMemory(7)
    for take in (memory.take, memory.share):
        with pytest.raises(OutOfSpaceError, match="Step 7 needs") as refused:
            take([PAGE, PAGE])
        assert (refused.value.needed, refused.value.available) == (2 * PAGE, 2 * PAGE - 1)
    assert shared_pages(memory) == 0
    memory.discard()
