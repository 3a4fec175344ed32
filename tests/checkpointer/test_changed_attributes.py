"""Attributes that change while training, and are not saved, are reported once and by name."""

from __future__ import annotations

import gc
import random
import weakref
from collections import defaultdict
from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch

from flashckpt.checkpointer.trainer_run import FIRST, SECOND, Unsaved


class Color(str, Enum):
    RED = "red"


class Owner:
    """A trainer: its attributes are the test's."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


def found_after(
    owner: object, change: Callable[[int], object], known: tuple[str, ...] = (), **how: Any
) -> tuple[str, ...]:
    """What is found when `change(n)` runs in each of the first iterations."""
    unsaved = Unsaved({"trainer": owner}, {"trainer": known}, **how)
    for number in range(1, SECOND + 3):
        change(number)
        unsaved.observe()
    return unsaved.found


def set_to(owner: Any, value: Callable[[int], Any]) -> Callable[[int], None]:
    return lambda number: setattr(owner, "value", value(number))


CHANGES: dict[str, Callable[[int], Any]] = {
    "a counter": lambda n: n,
    "None, and then a number": lambda n: None if n < SECOND else 1,
    "a dict": lambda n: {"loss": [0.5, n]},
    "a dict that makes entries": lambda n: defaultdict(list, a=[n]),
    "a set": lambda n: {"a", n},
    "nested": lambda n: {"a": {"b": [{"c": (1, n)}]}},
    "a tensor": lambda n: torch.tensor(float(n)),
    "a large tensor": lambda n: torch.zeros(1 << 19),
    "an array": lambda n: np.full(3, n),
    "the end of a long list": lambda n: [0] * 3000 + [n],
    "one that moves in every second iteration": lambda n: n // 2,
    "NaN that becomes a number": lambda n: float("nan") if n < SECOND else 0.0,
    "a generator": lambda n: random.Random(n),
}

SAME: dict[str, Callable[[int], Any]] = {
    "numbers": lambda n: {"a": 1, "b": [0.5, None, float("nan")], "c": Color.RED},
    "an equal tensor": lambda n: torch.ones(3),
    "sets": lambda n: {"a", "b", "c"},
    "objects": lambda n: Owner(count=n),
    "a list of objects": lambda n: [Owner(count=n)] * n,
    "a function": lambda n: lambda: n,
    "the global generator": lambda n: torch.default_generator,
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_found(name: str) -> None:
    # What cannot be read hides no other.
    owner = Owner(same=1, odd=torch.zeros(2, dtype=torch.complex64).conj())
    assert found_after(owner, set_to(owner, CHANGES[name])) == ("trainer.value",)


@pytest.mark.parametrize("name", SAME)
def test_nothing_is_found_where_nothing_changes(name: str) -> None:
    owner = Owner()
    assert found_after(owner, set_to(owner, SAME[name])) == ()


@pytest.mark.parametrize(
    "value", [torch.ones(3), torch.ones(1 << 19), {"sum": torch.ones(1 << 19)}, torch.ones(8).to_sparse()]
)
def test_a_change_in_place_is_found(value: Any) -> None:
    owner = Owner(value=value)
    tensor = value["sum"] if isinstance(value, dict) else value
    assert found_after(owner, lambda n: tensor.mul_(2)) == ("trainer.value",)
    assert found_after(owner, lambda n: None) == ()


def test_what_the_first_iteration_makes_is_not_found() -> None:
    owner = Owner()
    assert found_after(owner, lambda n: setattr(owner, "cache", {"made": 1})) == ()


def test_an_attribute_that_is_set_later_is_found() -> None:
    owner = Owner()
    assert found_after(owner, lambda n: n < SECOND or setattr(owner, "value", 1)) == ("trainer.value",)


@pytest.mark.parametrize(
    "named", [{"known": ("value",)}, {"own": ("value",)}, {"own": ("trainer.value",)}], ids=str
)
def test_a_known_name_is_silent(named: Any, caplog: pytest.LogCaptureFixture) -> None:
    owner = Owner()
    assert found_after(owner, set_to(owner, int), **named) == ()
    assert not caplog.records


def test_one_warning_names_class_attribute_and_remedy(caplog: pytest.LogCaptureFixture) -> None:
    owner, callback = Owner(), Owner()
    unsaved = Unsaved({"trainer": owner, "callback 0": callback}, {})
    for number in range(3 * SECOND):
        owner.count, callback.best, callback.count = number, -number, number
        unsaved.observe()
    (record,) = caplog.records
    message = record.getMessage()
    assert "Owner.count (trainer), Owner.best (callback 0), Owner.count (callback 0)" in message
    assert 'own=("count", "best")' in message
    assert "A resumed run begins with their first values" in message


def test_generators_and_modules_of_the_state_need_no_name() -> None:
    def change(_: int) -> None:
        for each in (owner.net, owner.average):
            with torch.no_grad():
                each[0].weight.add_(1)
        owner.drawn.random()
        torch.rand(1, generator=owner.noise)

    owner: Any = Owner(
        net=torch.nn.Sequential(torch.nn.Linear(2, 2)),
        average=torch.nn.Sequential(torch.nn.Linear(2, 2)),
        drawn=random.Random(1),
        noise=torch.Generator(),
    )
    assert found_after(owner, change, saved=[owner.net, owner.noise]) == (
        "trainer.average",
        "trainer.drawn",
    )
    wrapped = torch.nn.ModuleList([owner.net, owner.average])
    assert found_after(owner, change, saved=[wrapped, owner.drawn]) == ("trainer.noise",)


def test_no_code_of_the_user_is_called() -> None:
    class Loud:
        """A proxy whose every access is an error."""

        def __init__(self) -> None:
            self.count = 0

        def __getattribute__(self, name: str) -> Any:
            raise AssertionError(name)

        @property
        def computed(self) -> int:
            raise AssertionError

    class LoudList(list):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            raise AssertionError

        __len__ = __repr__ = __iter__

    class LoudDict(dict):  # type: ignore[type-arg]
        def items(self) -> Any:
            raise AssertionError

        __len__ = __repr__ = __iter__ = items

    loud, value = Loud(), Owner(inner=Loud(), entries=LoudList([0]), table=LoudDict(a=0), kinds={Color.RED})

    def change(number: int) -> None:
        object.__getattribute__(loud, "__dict__")["count"] = number
        list.__setitem__(value.entries, 0, number)

    assert found_after(loud, change) == ("trainer.count",)
    assert found_after(value, change) == ("trainer.entries",)


def test_an_error_ends_the_comparison_and_not_the_loop() -> None:
    class Broken:
        __slots__ = ()

    class Odd(np.ndarray):  # type: ignore[type-arg]
        pass

    inference = Owner()
    with torch.inference_mode():
        inference.value = torch.zeros(2)
    assert found_after(inference, lambda n: None) == ()
    assert found_after(Broken(), lambda n: None) == ()
    assert (
        found_after(Owner(meta=torch.zeros(3, device="meta"), odd=np.zeros(1).view(Odd)), lambda n: None)
        == ()
    )

    class Raising(dict):  # type: ignore[type-arg]
        def values(self) -> Any:
            raise RuntimeError

    module = torch.nn.Linear(1, 1)
    vars(module)["_parameters"] = Raising()
    assert found_after(Owner(module=module), lambda n: None) == ()


def test_nothing_is_kept_alive() -> None:
    owner = Owner(value=torch.zeros(1 << 19), rows=[torch.zeros(8)])
    unsaved = Unsaved({"trainer": owner}, {}, saved=[owner])
    for _ in range(FIRST):
        unsaved.observe()
    tensor = weakref.ref(owner.value)
    del owner.value
    gc.collect()
    assert tensor() is None
    for _ in range(SECOND):
        unsaved.observe()
    kept = weakref.ref(owner)
    del owner
    gc.collect()
    assert kept() is None
