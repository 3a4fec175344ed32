"""A slot's page, word and record: what is written comes back, what is damaged is refused."""

import mmap
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flashckpt import _native
from flashckpt.errors import DamagedError, FormatError, KeeperError
from flashckpt.format import metadata
from flashckpt.format.layout import Layout, Leaf, SlotImage
from flashckpt.format.names import AttemptName
from flashckpt.memory import region as page
from flashckpt.memory.region import SlotHeader
from flashckpt.memory.slot import Heartbeat, Sealed, Slot, SlotRing, SlotState
from tests.descriptors import closed_after
from tests.keeper.region import record_of, seal, write_metadata

IDENTITY = bytes(range(16))
LAYOUT = Layout.of([Leaf(name="a", dtype="float32", shape=(5, 3)), Leaf(name="b", dtype="uint8", shape=(7,))])
VALUES = b'{"x":1}'


def make(index: int = 0, **changes: Any) -> Slot:
    """A slot, or a region, in a memfd; `changes` are to its header."""
    fields: dict[str, Any] = {"identity": IDENTITY, "rank": 0, "index": index, "nonce": index}
    fields |= {"metadata_capacity": 4096, "image_capacity": 8192, **changes}
    header = SlotHeader(**fields)
    descriptor = os.memfd_create(header.name)
    os.ftruncate(descriptor, header.num_bytes)
    Slot.format(descriptor, header)
    return Slot.open(descriptor, map_image=True, identity=header.identity)


@pytest.fixture
def slot() -> Slot:
    return closed_after(make())


def fill(slot: Slot, step: int, attempt: int = 1, boundary: int = 0, *, confirms: bool = False) -> int:
    """Write and seal a snapshot by hand, in the order that a trainer and its sealer do."""
    generation = slot.begin(1)
    assert generation is not None
    places = write_metadata(slot.metadata_view, metadata.plan_bytes(SlotImage(LAYOUT)), [step, 2], VALUES)
    name, how = AttemptName(attempt, "00000007"), {"captured_ns": step, "boundary": boundary}
    slot.write_record(record_of(name, step, generation, LAYOUT, places, **how))
    seal(slot, 1, generation, places, confirms=confirms)
    return generation


def test_a_sealed_snapshot_comes_back_in_another_mapping(slot: Slot) -> None:
    fill(slot, 5)
    other = Slot.open(os.dup(slot.descriptor), map_image=False, identity=IDENTITY)
    sealed = other.sealed()
    assert (sealed.step, sealed.record.attempt_nonce, sealed.generation) == (5, 7, 1)
    found = other.metadata(sealed)
    assert found.image == SlotImage(LAYOUT)
    assert list(found.digests) == [5, 2]
    assert found.values == VALUES
    with pytest.raises(AssertionError):
        _ = other.image_address
    other.close()


def test_the_word_moves_only_along_its_arrows(slot: Slot) -> None:
    assert slot.state() == (SlotState.FREE, 0, 0)
    generation = slot.begin(3)
    assert generation == 1
    assert slot.state() == (SlotState.WRITING, 3, 1)
    assert slot.begin(4) is None, "what is being written is nobody else's"
    assert not slot.abandon(4, 1)
    assert slot.pin(2, slot.state()) is None
    assert slot.abandon(3, 1)
    assert fill(slot, 1) == 2
    sealed = slot.state()
    pinned = slot.pin(9, sealed)
    assert pinned == (SlotState.PINNED, 9, 2)
    assert slot.begin(3) is None, "a pinned snapshot is not overwritten"
    assert slot.pin(8, sealed) is None
    assert slot.unpin(pinned)
    assert not slot.unpin(pinned)
    assert slot.begin(3) == 3
    assert slot.sealed() is None


def test_an_unconfirmed_snapshot_is_its_owners_alone(slot: Slot) -> None:
    sealer = _native.Sealer()
    for is_confirmed in (True, False):
        generation = fill(slot, 4, confirms=True)
        unconfirmed = slot.state()
        assert unconfirmed == (SlotState.UNCONFIRMED, 1, generation)
        assert slot.sealed() is None, "no keeper persists it, no rank resumes from it"
        assert slot.begin(1) is None
        assert slot.pin(2, unconfirmed) is None
        assert SlotRing([slot]).take() is None
        assert not slot.confirm(sealer, 2, generation)
        assert not slot.confirm(sealer, 1, generation + 1)
        if is_confirmed:
            assert slot.confirm(sealer, 1, generation)
            assert slot.state() == (SlotState.SEALED, 0, generation)
        else:
            assert slot.abandon(1, generation)
            assert not slot.confirm(sealer, 1, generation)
            assert slot.state() == (SlotState.FREE, 0, generation)


@pytest.mark.parametrize("offset", [0, 9, 40, 100, 239, 240, 255])
def test_a_flipped_byte_in_what_does_not_move_is_refused(slot: Slot, offset: int) -> None:
    flip(slot, offset)
    with pytest.raises(DamagedError):
        Slot.open(os.dup(slot.descriptor), map_image=False)


@pytest.mark.parametrize("offset", [0, 15, 16, 24, 32, 40, 200, 239, 240, 255])
def test_a_flipped_byte_in_the_record_is_refused(slot: Slot, offset: int) -> None:
    fill(slot, 1)
    flip(slot, page.RECORD_OFFSET + offset)
    with pytest.raises(DamagedError):
        slot.sealed()


@pytest.mark.parametrize("offset", [0, 9, 17, 64, 100, -1, -20])
def test_a_flipped_byte_in_the_metadata_is_refused(slot: Slot, offset: int) -> None:
    fill(slot, 1)
    sealed = slot.sealed()
    flip(slot, 4096 + offset % sealed.record.metadata_bytes)
    with pytest.raises(DamagedError):
        slot.metadata(sealed)


def test_a_word_that_is_none_is_mended_to_free(slot: Slot) -> None:
    fill(slot, 1)
    flip(slot, page.WORD_OFFSET, 0x40)
    with pytest.raises(DamagedError):
        slot.state()
    assert SlotRing([slot]).take() is None
    assert slot.mend()
    assert not slot.mend()
    assert slot.state() == (SlotState.FREE, 0, 1)


def test_a_newer_version_and_another_run_are_left_alone(slot: Slot) -> None:
    with pytest.raises(KeeperError):
        Slot.open(os.dup(slot.descriptor), map_image=False, identity=bytes(16))
    fields = bytearray(slot.header.packed()[:240])
    fields[8] = 99
    os.pwrite(slot.descriptor, bytes(fields) + _native.xxh3_128(bytes(fields)), 0)
    with pytest.raises(FormatError):
        Slot.open(os.dup(slot.descriptor), map_image=False)


def test_a_region_shorter_than_its_page_says_is_never_mapped(slot: Slot) -> None:
    os.ftruncate(slot.descriptor, 3 * 4096)
    with pytest.raises(DamagedError, match="bytes long"):
        Slot.open(os.dup(slot.descriptor), map_image=True)
    os.ftruncate(slot.descriptor, 4 * 4096)


def test_the_last_reference_and_an_error_close_the_descriptor(slot: Slot) -> None:
    other = Slot.open(os.dup(slot.descriptor), map_image=True)
    descriptors = [other.descriptor, os.dup(slot.descriptor)]
    del other
    with pytest.raises(KeeperError):
        Slot.open(descriptors[1], map_image=True, identity=bytes(16))
    for each in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(each)


def test_mappings_are_neither_forked_nor_dumped(slot: Slot) -> None:
    blocks = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    [mine] = [block for block in blocks if "memfd:slot-00000-0" in block]
    flags = mine.split("VmFlags:")[1].split()
    assert {"dc", "dd"} <= set(flags)


@pytest.mark.process
def test_two_processes_begin_one_slot_once(slot: Slot) -> None:
    """Many begins at once: every generation is given to exactly one."""
    code = (
        "import sys; from flashckpt.memory.slot import Slot; owner=int(sys.argv[2]);"
        "slot=Slot.open(int(sys.argv[1]), map_image=False); won=[];"
        "print('ready', flush=True); sys.stdin.read(1)\n"
        "while len(won) < 5000:\n"
        "    g = slot.begin(owner)\n"
        "    if g is not None:\n"
        "        won.append(g); assert slot.abandon(owner, g)\n"
        "print(*won)"
    )
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(slot.descriptor), str(owner)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[slot.descriptor], text=True,
        )
        for owner in (1, 2)
    ]  # fmt: skip
    for child in children:
        assert child.stdout.readline() == "ready\n"
    for child in children:
        child.stdin.write("x")
        child.stdin.flush()
    won = [int(each) for child in children for each in child.communicate(timeout=240)[0].split()]
    assert sorted(won) == list(range(1, 10001))


def test_owners_are_given_indexes_and_the_dead_are_replaced(slot: Slot) -> None:
    alive = {f"trainer-{i}.lock" for i in range(page.OWNERS)}
    indexes = [slot.enroll(i, f"trainer-{i}.lock", alive.__contains__) for i in range(page.OWNERS)]
    assert indexes == list(range(1, page.OWNERS + 1))
    assert slot.enroll(3, "trainer-3.lock", alive.__contains__) == 4
    with pytest.raises(KeeperError):
        slot.enroll(99, "trainer-99.lock", alive.__contains__)
    # The dead one whose index the word still names is not replaced: it is to be found dead first.
    generation = slot.begin(6)
    assert generation is not None
    alive -= {"trainer-5.lock", "trainer-8.lock"}
    assert slot.enroll(99, "trainer-99.lock", alive.__contains__) == 9
    assert slot.owner(9) == (99, "trainer-99.lock")
    assert slot.owner(6) == (5, "trainer-5.lock")
    flip(slot, page.OWNERS_OFFSET + 8 * page.OWNER_BYTES + 3)
    assert slot.owner(9) is None, "half an entry is nobody"


def test_words_between_trainer_and_keeper(slot: Slot) -> None:
    slot.request_persist(4)
    assert slot.wants_persist(4)
    assert not slot.wants_persist(3)
    slot.set_persisted(4)
    assert not slot.wants_persist(4)
    slot.set_failed(5)
    assert slot.failed == 5
    slot.set_torn(6, list(range(100)))
    assert slot.torn == (6, tuple(range(page.TORN_LEAVES)))
    slot.beat(Heartbeat(12, 13, 2, 14))
    assert slot.heartbeat == (12, 13, 2, 14)
    assert slot.complete == (0, 0)
    slot.set_complete(999_999_999, 2**34 - 1)
    assert slot.complete == (999_999_999, 2**34 - 1)
    assert slot.heartbeat == (12, 13, 2, 14)
    assert page.TORN_LEAVES_OFFSET + 8 * page.TORN_LEAVES <= page.BOUNDARIES_OFFSET
    assert page.RECORD_OFFSET + page.RECORD_BYTES <= page.OWNERS_OFFSET
    assert page.OWNERS_OFFSET + page.OWNERS * page.OWNER_BYTES <= mmap.PAGESIZE


def newest_in(ring: SlotRing) -> tuple[Slot, Sealed]:
    newest = ring.newest_sealed()
    assert newest is not None
    return newest


class TestRing:
    @pytest.fixture
    def slots(self) -> list[Slot]:
        return [closed_after(make(index)) for index in range(3)]

    def test_free_slots_come_first_then_the_oldest_sealed_and_never_the_newest(
        self, slots: list[Slot]
    ) -> None:
        ring = SlotRing(slots)
        for step, expected in ((1, 0), (2, 1), (3, 2), (4, 0), (5, 1)):
            taken = ring.take()
            assert taken is slots[expected], step
            fill(taken, step)
        assert newest_in(ring)[1].step == 5
        for oldest in (slots[2], slots[0]):
            assert ring.take() is oldest
            assert oldest.begin(1) is not None
        assert ring.take() is None

    def test_one_that_is_asked_for_and_in_the_cache_is_given_away(self, slots: list[Slot]) -> None:
        ring = SlotRing(slots)
        for step, slot in enumerate(slots):
            slot.request_persist(fill(slot, step, boundary=step))
        assert ring.take() is None
        slots[-1].set_cached(slots[-1].state().generation)
        assert ring.take() is None  # the newest stays
        slots[1].set_cached(slots[1].state().generation + 1)
        assert ring.take() is None  # what was cached was another
        slots[1].set_cached(slots[1].state().generation)
        assert ring.take() is slots[1]

    def test_the_only_slot_is_given_away_once_it_is_cached_and_else_goes_home(self, slot: Slot) -> None:
        ring = SlotRing([slot], is_single=True)
        slot.request_persist(generation := fill(slot, 1))
        assert ring.take() is None
        slot.set_cached(generation)
        assert ring.take() is slot
        slot.request_persist(generation := fill(slot, 2), home=False)
        ring.request_single()
        assert not slot.wants_home(generation)  # it is on its way
        slot.set_failed(generation)
        assert ring.take() is None
        ring.request_single()
        assert slot.wants_home(generation)
        slot.set_persisted(generation)
        assert ring.take() is slot

    def test_what_is_to_be_persisted_waits_until_done_or_failed(self, slots: list[Slot]) -> None:
        ring = SlotRing(slots)
        first, second = fill(slots[0], 1), fill(slots[1], 2)
        fill(slots[2], 3)
        slots[0].request_persist(first)
        slots[1].request_persist(second)
        assert ring.take() is None
        slots[0].set_failed(first)
        assert ring.take() is slots[0]
        slots[1].set_persisted(second)
        assert ring.take() is slots[1], "what is done goes before what has failed"

    def test_a_pinned_slot_is_not_taken_and_a_damaged_snapshot_is_the_first_to_go(
        self, slots: list[Slot]
    ) -> None:
        ring = SlotRing(slots)
        for step, each in enumerate(slots):
            fill(each, step)
        assert slots[0].pin(9, slots[0].state()) is not None
        assert ring.take() is slots[1]
        flip(slots[2], page.RECORD_OFFSET + 30)
        assert ring.take() is slots[2]
        assert newest_in(ring)[1].step == 1

    def test_a_later_attempt_is_newer_whatever_its_step(self, slots: list[Slot]) -> None:
        ring = SlotRing(slots)
        fill(slots[0], 100, attempt=1)
        fill(slots[1], 50, attempt=2)
        fill(slots[2], 60, attempt=1)
        assert newest_in(ring)[0] is slots[1]
        assert ring.take() is slots[2]

    def test_among_ranks_the_newest_complete_stays_and_all_that_are_newer(self, slots: list[Slot]) -> None:
        ring = SlotRing(slots)
        for boundary, each in enumerate(slots, 1):
            each.set_complete(1, 0)
            fill(each, 5, boundary=boundary)
        assert ring.take() is None, "none is complete: each may be"
        for each in slots:
            each.set_complete(1, 2)
        assert ring.take() is slots[0], "a newer one is complete"
        assert slots[0].begin(1) is not None
        assert ring.take() is None
        for each in slots:
            each.set_complete(1, 3)
        assert ring.take() is slots[1]

    def test_what_the_resume_took_up_stays_until_another_is_complete(self, slots: list[Slot]) -> None:
        ring = SlotRing(slots)
        for each in slots:
            each.set_complete(1, 7)
        fill(slots[0], 70, boundary=7)
        fill(slots[1], 71, attempt=2, boundary=1)
        fill(slots[2], 72, attempt=2, boundary=2)
        assert ring.take() is None
        for each in slots:
            each.set_complete(2, 1)
        assert ring.take() is slots[0]

    def test_what_an_earlier_job_of_many_left_says_nothing_of_a_rank_alone(self, slots: list[Slot]) -> None:
        ring = SlotRing(slots)
        for boundary, each in enumerate(slots[:2], 1):
            each.set_complete(1, 1)
            fill(each, 5, boundary=boundary)
        fill(slots[2], 6, attempt=2)
        assert ring.take() is slots[0]


class TestMetadata:
    def block(self) -> bytearray:
        block = bytearray(4096)
        places = write_metadata(memoryview(block), metadata.plan_bytes(SlotImage(LAYOUT)), [0, 0], VALUES)
        return block[: places.num_bytes]

    def test_lengths_beyond_the_room_too_few_digests_and_a_newer_version_are_refused(self) -> None:
        for lengths in (
            (1 << 62, 2, 7), (10, 1 << 61, 7), (10, 2, 1 << 62), (10, 2, 1 << 20)
        ):  # fmt: skip
            block = self.block()
            block[:64] = metadata.header(*lengths)
            with pytest.raises(DamagedError):
                metadata.Metadata.unpack(block)
        plan = metadata.plan_bytes(SlotImage(LAYOUT))
        block = self.block()
        block[:64] = metadata.header(len(plan), 1, len(VALUES))
        with pytest.raises(DamagedError, match="1 digests for 2 leaves"):
            metadata.Metadata.unpack(block)
        block = self.block()
        block[8] = metadata.VERSION + 1
        with pytest.raises(FormatError):
            metadata.Metadata.unpack(block)
        with pytest.raises(DamagedError):
            metadata.Metadata.unpack(block[:63])

    def test_strides_and_aliases_come_back(self) -> None:
        leaf = Leaf(name="ä", dtype="complex64", shape=(2, 2), stride=(1, 2), aliases=("z", "y"))
        layout = Layout.of([leaf, replace(leaf, name="0d", shape=(), stride=None, aliases=())])
        for image in (SlotImage(layout), SlotImage(Layout.of([]))):
            block = memoryview(bytearray(4096))
            write_metadata(block, metadata.plan_bytes(image), [0] * len(image.leaves))
            assert metadata.Metadata.unpack(block).image == image


def flip(slot: Slot, offset: int, bit: int = 1) -> None:
    byte = os.pread(slot.descriptor, 1, offset)[0]
    os.pwrite(slot.descriptor, bytes([byte ^ bit]), offset)
