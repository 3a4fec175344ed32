"""Atomics between processes, events, seals, and what a fork leaves of them."""

import errno
import mmap
import os
import signal
import threading
from array import array
from collections.abc import Callable

import pytest

from flashckpt import _native
from tests.descriptors import closed_after

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

WRITING, SEALED, UNCONFIRMED, OWNER, GENERATION = 1, 2, 4, 5, 77
WORD, RECORD, TABLE, METADATA, DONE = 0, 256, 1024, 960, 8
COUNT = 50


def word(state: int, owner: int = OWNER) -> int:
    return state | owner << 8 | GENERATION << 16


class Slot:
    """The words of a slot in memory that forked processes share."""

    def __init__(self, digest: int = 3) -> None:
        self.map = mmap.mmap(-1, 8192)
        self.address = _native.address_of(self.map)
        self.map[RECORD : RECORD + 256] = bytes(range(256))
        _native.store(self.address + WORD, word(WRITING))
        for entry in range(COUNT):
            _native.store(self.address + TABLE + 8 * entry, digest + entry)

    def submit(self, sealer: _native.Sealer, *waits: int, desired: int = SEALED) -> None:
        at = self.address
        sealer.submit(
            waits=list(waits),
            word=at + WORD,
            expected=word(WRITING),
            desired=word(desired),
            record=at + RECORD,
            metadata=at + METADATA,
            metadata_bytes=600,
            table=at + TABLE,
            table_count=COUNT,
            on_done_word=at + DONE,
        )

    def confirm(self, sealer: _native.Sealer) -> bool:
        return sealer.confirm(
            word=self.address + WORD,
            writing=word(WRITING),
            unconfirmed=word(UNCONFIRMED),
            sealed=word(SEALED, 0),
        )

    @property
    def word(self) -> int:
        return _native.load(self.address + WORD)

    @property
    def done(self) -> int:
        return _native.load(self.address + DONE)


def child(work: Callable[[], None]) -> int:
    """Forks; the child works and exits with 0, or with 1 after an exception."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return pid


def exit_code(pid: int, seconds: int = 60) -> int:
    """Waits for a child, but not for ever: one that hangs is killed and its signal returned."""
    timer = threading.Timer(seconds, os.kill, (pid, signal.SIGKILL))
    timer.start()
    _, status = os.waitpid(pid, 0)
    timer.cancel()
    return os.waitstatus_to_exitcode(status)


@pytest.mark.process
def test_compare_exchange_between_processes() -> None:
    shared = mmap.mmap(-1, 4096)
    address, rounds = _native.address_of(shared), 20_000

    def count() -> None:
        for _ in range(rounds):
            seen = _native.load(address)
            while not _native.compare_exchange(address, seen, seen + 1):
                seen = _native.load(address)
            _native.fetch_add(address + 8, 2**64 - 3)

    pids = [child(count) for _ in range(3)]
    count()
    assert [exit_code(pid) for pid in pids] == [0, 0, 0]
    assert _native.load(address) == 4 * rounds
    assert _native.load(address + 8) == (-3 * 4 * rounds) % 2**64
    assert not _native.compare_exchange(address, 0, 1)


def test_a_seal_waits_for_all_its_events_and_then_writes_the_record() -> None:
    slot, sealer, events = Slot(), _native.Sealer(), [_native.HostEvent(), _native.HostEvent()]
    slot.submit(sealer, *(event.handle for event in events))
    events[1].set()
    assert not sealer.drain(0.05)
    assert (slot.word, slot.done) == (word(WRITING), 0)
    events[0].set()
    assert sealer.drain(240)
    assert (slot.word, slot.done) == (word(SEALED), 1)
    assert sealer.failures() == []
    record = slot.map[RECORD : RECORD + 256]
    assert record[:16] == _native.xxh3_128(slot.map[METADATA : METADATA + 600])
    assert record[16:240] == bytes(range(16, 240))
    assert record[240:] == _native.xxh3_128(record[:240])
    sealer.close()


def test_a_table_with_an_empty_entry_is_refused() -> None:
    for entry in (0, COUNT - 1):
        slot, sealer = Slot(), _native.Sealer()
        _native.store(slot.address + TABLE + 8 * entry, _native.EMPTY_DIGEST)
        slot.submit(sealer)
        assert sealer.drain(240)
        assert (slot.word, slot.done) == (GENERATION << 16, 1)
        [(address, reason, copied)] = sealer.failures()
        assert (address, copied) == (slot.address, True)
        assert f"digest {entry} of {COUNT} " in reason
        assert sealer.failures() == []
        sealer.close()


def test_a_refused_seal_has_a_reason() -> None:
    """Others hold the lock most of the time, so that there is much between the two where they are apart."""
    sealer, over = _native.Sealer(), threading.Event()

    def ask() -> None:
        while not over.is_set():
            sealer.drain(0)

    asking = [threading.Thread(target=ask) for _ in range(3)]
    for thread in asking:
        thread.start()
    for _ in range(1000):
        slot, event = Slot(), _native.HostEvent()
        _native.store(slot.address + TABLE, _native.EMPTY_DIGEST)
        slot.submit(sealer, event.handle)
        event.set()
        while slot.word == word(WRITING):
            pass
        found = [address for address, _, _ in sealer.failures()]
        if found != [slot.address]:
            break
    over.set()
    for thread in asking:
        thread.join()
    assert found == [slot.address]
    sealer.close()


def test_a_slot_taken_by_another_owner_is_not_changed() -> None:
    slot, sealer, event = Slot(), _native.Sealer(), _native.HostEvent()
    slot.submit(sealer, event.handle)
    _native.store(slot.address, word(WRITING, owner=9))
    event.set()
    assert sealer.drain(240)
    assert slot.word == word(WRITING, owner=9)
    assert "changed by another" in sealer.failures()[0][1]
    sealer.close()


def test_one_seal_does_not_wait_for_another() -> None:
    late, soon, sealer, event = Slot(), Slot(), _native.Sealer(), _native.HostEvent()
    ready = _native.HostEvent()
    late.submit(sealer, event.handle)
    soon.submit(sealer, ready.handle)
    ready.set()
    while soon.done == 0:
        ready.wait(0.001)
    assert (soon.word, late.word) == (word(SEALED), word(WRITING))
    event.set()
    assert sealer.drain(240)
    sealer.close()


def test_a_confirmed_slot_is_sealed_before_or_after_its_copies_end() -> None:
    sealer = _native.Sealer()
    for is_early in (True, False):
        event, slot = _native.HostEvent(), Slot()
        slot.submit(sealer, event.handle, desired=UNCONFIRMED)
        if is_early:
            assert slot.confirm(sealer)
            assert slot.word == word(WRITING)
        event.set()
        assert sealer.drain(60)
        assert slot.word == (word(SEALED, 0) if is_early else word(UNCONFIRMED))
        assert slot.confirm(sealer) is not is_early
        assert slot.word == word(SEALED, 0)
        # What was confirmed is forgotten: another snapshot in the slot needs a confirmation of its own.
        _native.store(slot.address + WORD, word(WRITING))
        slot.submit(sealer, desired=UNCONFIRMED)
        assert slot.word == word(UNCONFIRMED)
    sealer.close()


def test_a_refused_slot_stays_free_though_it_was_confirmed() -> None:
    sealer, event, slot = _native.Sealer(), _native.HostEvent(), Slot(digest=3)
    _native.store(slot.address + TABLE, _native.EMPTY_DIGEST)
    slot.submit(sealer, event.handle, desired=UNCONFIRMED)
    assert slot.confirm(sealer)
    event.set()
    assert sealer.drain(60)
    assert slot.word == word(0, 0)
    assert not slot.confirm(sealer)
    assert slot.word == word(0, 0)
    sealer.close()


def test_many_slots_are_confirmed_while_they_are_sealed() -> None:
    """The confirmation or the end of the copies may come first: each slot is sealed."""
    sealer = _native.Sealer()
    for _ in range(300):
        event, slot = _native.HostEvent(), Slot()
        slot.submit(sealer, event.handle, desired=UNCONFIRMED)
        setter = threading.Thread(target=event.set)
        setter.start()
        assert slot.confirm(sealer)
        setter.join()
        assert sealer.drain(60)
        assert slot.word == word(SEALED, 0)
    sealer.close()


def test_without_waits_a_slot_is_sealed_when_submit_returns() -> None:
    """A thread that gets no turn would leave whole snapshots unsealed."""
    sealer, slots = _native.Sealer(), [Slot() for _ in range(3)]
    for slot in slots:
        slot.submit(sealer)
        assert (slot.word, slot.done) == (word(SEALED), 1)
    waited, event = Slot(), _native.HostEvent()
    waited.submit(sealer, event.handle)
    after = Slot()
    after.submit(sealer)  # by the thread: something is undecided before it
    event.set()
    assert sealer.drain(240)
    assert (waited.word, after.word) == (word(SEALED), word(SEALED))
    sealer.close()


def test_close_seals_ready_slots_and_leaves_the_rest_unchanged() -> None:
    waiting, ready, sealer, event = Slot(), Slot(), _native.Sealer(), _native.HostEvent()
    waiting.submit(sealer, event.handle)
    ready.submit(sealer)
    sealer.close()
    assert ready.word == word(SEALED)
    assert waiting.word == word(WRITING)
    assert [address for address, _, _ in sealer.failures()] == [waiting.address]
    with pytest.raises(ValueError, match="closed"):
        ready.submit(sealer)
    sealer.close()


def test_two_concurrent_closes_both_return() -> None:
    for _ in range(50):
        sealer, event, slots = _native.Sealer(), _native.HostEvent(), [Slot() for _ in range(50)]
        for slot in slots:
            slot.submit(sealer, event.handle)
        found: list[int] = []
        ready = threading.Barrier(2)

        def close(
            sealer: _native.Sealer, slots: list[Slot], found: list[int], ready: threading.Barrier
        ) -> None:
            ready.wait()
            sealer.close()
            found.append(sum(slot.done for slot in slots))

        threads = [threading.Thread(target=close, args=(sealer, slots, found, ready)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [50, 50]


def test_a_wait_survives_an_early_reset_and_a_deleted_event() -> None:
    slot, sealer, event = Slot(), _native.Sealer(), _native.HostEvent()
    event.set()
    event.reset()
    slot.submit(sealer, event.handle)
    assert not sealer.drain(0.02)
    event.set()
    event.reset()
    assert sealer.drain(240)
    assert slot.word == word(SEALED)
    handle = event.handle
    del event
    with pytest.raises(ValueError, match="no event"):
        slot.submit(sealer, handle)
    sealer.close()


def copy_something(threads: int) -> None:
    source, to, out = bytearray(os.urandom(5 << 20)), bytearray(5 << 20), array("Q", [0])
    addresses = [array("Q", [_native.address_of(x)]) for x in (source, to)]
    _native.copy_digest(*addresses, array("Q", [len(source)]), _native.address_of(out), threads)
    assert to == source
    assert out[0] == _native.digest(_native.address_of(source), len(source))


@pytest.mark.process
def test_a_child_forked_while_the_threads_work_has_its_own_threads() -> None:
    stop, sealer, event = threading.Event(), _native.Sealer(), _native.HostEvent()
    slot = Slot()
    slot.submit(sealer, event.handle)

    def keep_busy() -> None:
        while not stop.is_set():
            copy_something(3)

    def use_everything() -> None:
        copy_something(3)
        mine = Slot()
        mine.submit(sealer)
        assert sealer.drain(240)
        assert mine.word == word(SEALED)
        sealer.close()

    busy = [threading.Thread(target=keep_busy) for _ in range(2)]
    for thread in busy:
        thread.start()
    try:
        users = [child(use_everything) for _ in range(8)]
        others = [child(lambda: None) for _ in range(4)]
        assert [exit_code(pid) for pid in users + others] == [0] * 12
    finally:
        stop.set()
        for thread in busy:
            thread.join()
    # What the parent submitted was the children's to leave alone.
    assert slot.word == word(WRITING)
    event.set()
    assert sealer.drain(240)
    assert slot.word == word(SEALED)
    sealer.close()


def native_threads() -> list[tuple[str, int]]:
    """Of this process: their names, and masks of the signals that they block."""
    found = []
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/status") as file:
            status = dict(line.split(":\t", 1) for line in file.read().splitlines())
        found.append((status["Name"], int(status["SigBlk"], 16)))
    return sorted(each for each in found if each[0].startswith("flashckpt"))


@pytest.mark.process
def test_threads_start_at_first_use_have_names_and_block_signals() -> None:
    def look() -> None:
        slot, sealer, event = Slot(), _native.Sealer(), _native.HostEvent()
        assert native_threads() == []
        copy_something(1)
        assert native_threads() == []
        copy_something(2)
        slot.submit(sealer, event.handle)
        while [name for name, _ in native_threads()] != ["flashckpt-seal", "flashckpt-work"]:
            os.sched_yield()
        for _, blocked in native_threads():
            assert blocked & 1 << signal.SIGINT - 1
            assert blocked & 1 << signal.SIGTERM - 1
        sealer.close()

    assert exit_code(child(look)) == 0


def test_memory_is_reserved_and_faulted_in_without_changing_a_byte() -> None:
    fd = closed_after(os.memfd_create("room"))
    _native.allocate(fd, 4096, 1 << 20)
    assert os.fstat(fd).st_blocks * 512 >= 1 << 20
    region = mmap.mmap(fd, 0)
    region[5000:5003] = b"abc"
    _native.populate(_native.address_of(region) + 100, len(region) - 100, 3)
    assert region[5000:5003] == b"abc"
    assert bytes(region).count(0) == len(region) - 3
    with pytest.raises(OSError, match="reserve") as refused:
        _native.allocate(fd, 2**63 - 4096, 8192)
    assert refused.value.errno == errno.EFBIG
    with pytest.raises(OSError, match="fault in"):
        _native.populate(4096, 4096, 1)
