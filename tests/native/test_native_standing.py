"""Standing says what `container[key] is value` says, and leaves no trace of having asked."""

import gc
import random
import sys
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from flashckpt import _native


class Plain:
    """An object with attributes, that can be referred to weakly."""


class Key:
    """Hashed and compared by code of Python, as a Parameter is."""

    def __init__(self, name: str = "") -> None:
        self.name = name

    def __hash__(self) -> int:
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and other.name == self.name


HIDDEN = Plain()


class Hiding(dict[Any, Any]):
    """A dict whose item access is its own."""

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        return None if found is HIDDEN else found


class Reversing(list[Any]):
    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(-1 - index)


def the_rule(container: Any, key: Any, value: object) -> bool:
    """What is asked, in Python. Some dicts make an entry when they are asked."""
    return (not isinstance(container, dict) or key in container) and container[key] is value


DICTS = (
    dict,
    OrderedDict,
    lambda pairs: defaultdict(list, pairs),
    lambda pairs: Counter(dict(pairs)),
    type("Mine", (dict,), {}),
    Hiding,
)


def test_equal_objects_are_not_identical() -> None:
    first, same = Key("a"), Key("a")
    held = {first: [1.0]}
    assert _native.Standing([], [(held, same, held[first])]).stands()
    assert not _native.Standing([], [(held, first, [1.0])]).stands()
    assert not _native.Standing([], [([[1.0]], 0, [1.0])]).stands()


def test_every_answer_follows_the_rule() -> None:
    """Any kind of container, changed in any way between two questions."""
    chance = random.Random(7)
    values = [None, HIDDEN, *(Plain() for _ in range(3))]
    for _ in range(300):
        keys: list[Any] = [*(Key(str(i)) for i in range(3)), "a", (2, "x"), None]
        containers: list[Any] = [
            chance.choice(DICTS)((key, chance.choice(values)) for key in keys),
            {key: chance.choice(values) for key in reversed(keys)},
            chance.choice((list, Reversing))(chance.choice(values) for _ in keys),
            deque(chance.choice(values) for _ in keys),
        ]
        places = [
            (held, chance.choice((i, i - len(keys))) if n > 1 else key)
            for n, held in enumerate(containers)
            for i, key in enumerate(keys)
        ]
        chance.shuffle(places)
        anchors = [(held, key, held[key]) for held, key in places]
        standing = _native.Standing([], anchors)
        assert standing.stands()
        for _ in range(3):
            held = chance.choice(containers)
            key = chance.choice(keys) if isinstance(held, dict) else chance.randrange(len(keys))
            kind = chance.random()
            if isinstance(held, dict) and kind < 0.2:
                held.pop(key, None)
            elif isinstance(held, dict) and kind < 0.6 and key in held:
                held[key] = held.pop(key)  # the last in order
            else:
                held[key] = chance.choice(values)
            sizes = [len(each) for each in containers]
            assert standing.stands() is all(the_rule(*anchor) for anchor in anchors)
            assert [len(each) for each in containers] == sizes, "asking made no entry"


def test_attributes_and_items_of_other_objects() -> None:
    owner, module, series = Plain(), nn.Linear(2, 2), (Plain(), Plain())
    owner.held = module
    standing = _native.Standing(
        [(series, 2)],
        [(owner, "held", module), (module, "weight", module.weight), (module, "bias", module.bias)]
        + [(module.weight, "grad", None), (series, 1, series[1])],
    )
    assert standing.stands()
    module.weight.grad = torch.ones(2, 2)
    assert not standing.stands()
    module.weight.grad = None
    assert standing.stands()
    del module.bias
    assert not standing.stands()
    assert not _native.Standing([], [(None, "no such", None)]).stands()


def test_lengths() -> None:
    class Counted:
        length: Any = 3

        def __len__(self) -> int:
            if isinstance(self.length, BaseException):
                raise self.length
            return self.length  # type: ignore[no-any-return]

    counted, listed, named = Counted(), [1, 2], {"a": 1}
    standing = _native.Standing([(counted, 3), (listed, 2), (named, 1)], [])
    assert standing.stands()
    for change in (listed.append, lambda x: named.update(b=x), lambda x: setattr(counted, "length", x)):
        change(4)
        assert not standing.stands()
        listed[2:], Counted.length = [], 3
        named.pop("b", None)
        vars(counted).clear()
        assert standing.stands()
    Counted.length = AttributeError("no")
    with pytest.raises(AttributeError):
        standing.stands()


class Raising:
    error: BaseException = RuntimeError("no")

    @property
    def place(self) -> object:
        raise self.error

    def __getitem__(self, key: object) -> object:
        raise self.error


@pytest.mark.parametrize("key", ["place", 1])
def test_errors_of_a_place(key: Any) -> None:
    standing = _native.Standing([], [(Raising(), key, None)])
    for error in (KeyError(1), IndexError(1), AttributeError("x")):
        Raising.error = error
        assert not standing.stands()
    for error in (RuntimeError("no"), TypeError("no"), KeyboardInterrupt()):
        Raising.error = error
        with pytest.raises(type(error)):
            standing.stands()
    with pytest.raises(TypeError):
        _native.Standing([], [({}, [], None)]).stands()


def test_code_that_runs_during_a_check_is_harmless() -> None:
    class Owner:
        @property
        def place(self) -> object:
            if depth:
                return None
            depth.append(1)
            answers.append(standing.stands())
            held.clear()
            gc.collect()
            held.update((Key(str(i)), Plain()) for i in range(9))
            return None

    depth: list[int] = []
    answers: list[bool] = []
    held: dict[Any, Any] = {Key(str(i)): Plain() for i in range(50)}
    first, *others = ((held, key, value) for key, value in held.items())
    standing = _native.Standing([], [first, (Owner(), "place", None), *others])
    assert not standing.stands()
    assert answers == [True]


def test_the_garbage_collector_sees_through_it() -> None:
    def cycles() -> Iterator[Callable[[Any], object]]:
        yield lambda held: _native.Standing([([held], 1)], [])
        yield lambda held: _native.Standing([], [([held], 0, None)])
        yield lambda held: _native.Standing([], [({1: 2}, (held,), None)])
        yield lambda held: _native.Standing([], [([], 0, [held])])

    for cycle in cycles():
        held = Plain()
        held.standing = cycle(held)
        seen = weakref.ref(held)
        assert seen() is not None
        del held
        gc.collect()
        assert seen() is None


def test_references_are_neither_lost_nor_kept() -> None:
    key, value, listed, owner = Key("key"), Plain(), [Plain()], Plain()
    owner.place = value
    held = {Key("before"): value, key: value}
    named = {"a": value}
    everything = [key, value, listed, listed[0], owner, held, named]
    before = [sys.getrefcount(each) for each in everything]
    anchors = [(held, key, value), (named, "a", value), (listed, 0, listed[0]), (owner, "place", value)]
    standing = _native.Standing([(held, 2), (listed, 1)], anchors)
    made = [sys.getrefcount(each) for each in everything]
    for _ in range(100):
        assert standing.stands()
    held[key] = held.pop(key)
    held[Key("before")] = held.pop(Key("before"))
    for _ in range(100):
        assert standing.stands()
    assert [sys.getrefcount(each) for each in everything] == made
    owner.place = None
    for _ in range(100):
        assert not standing.stands()
    owner.place = value
    del standing, anchors
    assert [sys.getrefcount(each) for each in everything] == before
