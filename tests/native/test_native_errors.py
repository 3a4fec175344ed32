"""What other people's code raises where native code asks it, and what native threads tell of a failure."""

from __future__ import annotations

import threading
from array import array

import pytest

from flashckpt import _native


class Raising:
    """Stands for a tensor, or for what holds one: whatever is asked of it raises."""

    def __init__(self, error: BaseException) -> None:
        object.__setattr__(self, "error", error)

    def __getattribute__(self, name: str) -> object:
        raise object.__getattribute__(self, "error")


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, MemoryError])
def test_errors_that_end_a_program_are_raised(kind: type[BaseException]) -> None:
    with pytest.raises(kind):
        _native.Watch([(None, None)], [Raising(kind())])
    watch = _native.Watch([(Raising(kind()), "weight")], [object()])
    with pytest.raises(kind):
        watch.changed(array("Q", [0]))
    with pytest.raises(kind):
        _native.Standing([], [(Raising(kind()), "weight", None)]).stands()
    watch.release()  # it is not taken for one that is being asked


@pytest.mark.parametrize("kind", [RuntimeError, NotImplementedError, ValueError])
def test_other_errors_count_as_a_change(kind: type[Exception]) -> None:
    addresses = array("Q", [7, 7])
    watch = _native.Watch([(None, None), (Raising(kind()), "weight")], [Raising(kind()), object()])
    assert watch.changed(addresses) == [1]
    assert list(addresses) == [0, 0]


class Slot:
    """A word, a record and a table for a seal, and the word that counts its end."""

    def __init__(self) -> None:
        self.words = array("Q", [2, 0])
        self.record = bytearray(256)
        self.table = array("Q", [_native.EMPTY_DIGEST])

    def submit(self, sealer: _native.Sealer, event: _native.HostEvent) -> None:
        word = _native.address_of(self.words)
        sealer.submit(
            waits=[event.handle], word=word, expected=2, desired=3, record=_native.address_of(self.record),
            metadata=0, metadata_bytes=0, table=_native.address_of(self.table), table_count=1,
            on_done_word=word + 8,
        )  # fmt: skip

    @property
    def done(self) -> int:
        return _native.load(_native.address_of(self.words) + 8)


def test_two_concurrent_closes_both_return() -> None:
    for _ in range(50):
        sealer, event, slots = _native.Sealer(), _native.HostEvent(), [Slot() for _ in range(50)]
        for slot in slots:
            slot.submit(sealer, event)
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
