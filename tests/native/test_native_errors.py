"""What other people's code raises where native code asks it."""

from __future__ import annotations

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
