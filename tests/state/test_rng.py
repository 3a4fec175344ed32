"""Random number generators are restored exactly, from compact plain values."""

import copy
import random
from functools import partial
from typing import Any, NoReturn

import numpy as np
import pytest
import torch

from flashckpt.errors import DamagedError
from flashckpt.state import rng


def draws() -> list[object]:
    return [
        [random.random() for _ in range(3)],
        random.gauss(0, 1),
        np.random.rand(3).tolist(),
        np.random.randn(3).tolist(),
        torch.rand(3).tolist(),
        torch.randn(20).tolist(),
        torch.randperm(9).tolist(),
    ]


def scramble(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


# In the middle of a Mersenne Twister block and of a pair of normal numbers: both are state.
@pytest.mark.parametrize("drawn_before", [0, 1, 700])
def test_the_same_numbers_again(drawn_before: int) -> None:
    scramble(1)
    for _ in range(drawn_before):
        random.gauss(0, 1), np.random.randn(), torch.randn(1), torch.randn((), dtype=torch.float64)
    state = rng.capture()
    expected = draws()
    scramble(2)
    rng.restore(state)
    assert rng.capture() == state
    assert draws() == expected


@pytest.mark.parametrize("drawn_before", [0, 1, 700])
def test_a_captured_state_is_immune_to_later_draws(drawn_before: int) -> None:
    own = {
        "torch": torch.Generator(), "python": random.Random(1), "state": np.random.RandomState(1),
        "pcg": np.random.default_rng(1), "twister": np.random.Generator(np.random.MT19937(1)),
        "philox": np.random.Generator(np.random.Philox(1)), "sfc": np.random.Generator(np.random.SFC64(1)),
    }  # fmt: skip
    generators = rng.Generators(own)
    scramble(1)
    for _ in range(drawn_before):
        random.gauss(0, 1), np.random.randn(), torch.randn(1)
    captured = generators.capture_all()
    expected = copy.deepcopy(captured)
    for _ in range(3):
        draws()
        torch.rand(3, generator=own["torch"]), own["python"].random()
        for name in ("state", "pcg", "twister", "philox", "sfc"):
            own[name].normal(size=1000)
    assert captured == expected
    assert generators.capture_all() != expected


def test_capture_draws_nothing() -> None:
    assert rng.capture() == rng.capture()


def test_a_default_device_does_not_matter() -> None:
    state = rng.capture()
    torch.set_default_device("meta")
    try:
        rng.restore(state)
        assert rng.capture() == state
    finally:
        torch.set_default_device(None)


def test_another_bit_generator_behind_numpys_global_functions() -> None:
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(5))
    try:
        np.random.randn(3)
        state = rng.capture()
        expected = np.random.randn(5).tolist()
        rng.restore(state)
        assert np.random.randn(5).tolist() == expected
    finally:
        np.random.set_bit_generator(before)


def test_a_single_generator() -> None:
    def draw(generator: Any) -> list[float]:
        if isinstance(generator, torch.Generator):
            return torch.randn(5, generator=generator).tolist()
        name = "gauss" if isinstance(generator, random.Random) else "normal"
        return [float(getattr(generator, name)(0, 1)) for _ in range(5)]

    bits = (np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64)
    others = (torch.Generator(), random.Random(1), np.random.RandomState(1))
    for generator in (*others, *(np.random.Generator(kind(1)) for kind in bits)):
        draw(generator)
        state = rng.capture_one(generator)
        expected = draw(generator)
        rng.restore_one(generator, state)
        assert draw(generator) == expected


@pytest.mark.parametrize("name", ["python", "numpy", "torch"])
@pytest.mark.parametrize("wrong", [b"x" * 100, None])
def test_a_wrong_state_changes_no_generator(name: str, wrong: object) -> None:
    before = rng.capture()
    with pytest.raises(DamagedError, match="Resume from an older step"):
        rng.restore({**before, name: wrong})
    assert rng.capture() == before


def test_a_missing_state_is_refused() -> None:
    with pytest.raises(DamagedError):
        rng.restore({})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_generators_are_restored() -> None:
    torch.rand(1, device="cuda")
    state = rng.capture()
    assert len(state["cuda"]) == torch.cuda.device_count()
    expected = torch.rand(5, device="cuda").tolist()
    torch.cuda.manual_seed_all(3)
    rng.restore(state)
    assert torch.rand(5, device="cuda").tolist() == expected


class Holder:
    def __init__(self, held: object) -> None:
        self.held = held


def found_in(root: object) -> int:
    return len(rng.Generators({"root": root}).capture())


def test_generators_are_found_once_without_the_global_ones() -> None:
    held: dict[str, Any] = {"first": torch.Generator()}
    held["nested"] = Holder([held["first"], held])
    held["global"] = (torch.default_generator, random._inst, np.random.mtrand._rand)  # type: ignore[attr-defined]
    assert list(rng.Generators({"sampler": Holder(held)}).capture()) == ["sampler.held.first"]


def test_generators_are_found_in_what_a_data_set_holds() -> None:
    module = torch.nn.ModuleList([torch.nn.Identity()])
    module[0].numbers = random.Random(1)
    deep: object = random.Random(2)
    for _ in range(9):
        deep = Holder(deep)
    assert found_in([{"a": (random.Random(3),)}, partial(print, random.Random(4), end=random.Random(5))]) == 3
    assert found_in(module) == 1
    assert found_in(deep) == 1


def test_a_search_that_is_cut_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    deep: object = random.Random(2)
    for _ in range(10):
        deep = Holder(deep)
    assert found_in(deep) == 0
    assert "the search for random generators in a loader was cut" in caplog.text
    caplog.clear()
    assert found_in({"rows": [Holder("a") for _ in range(100_000)], "numbers": random.Random(1)}) == 1
    assert not caplog.records, "items of data"
    assert found_in(Holder([Holder(random.Random(each)) for each in range(40)])) == 32
    assert "the first 32 of the 40 items of root.held" in caplog.text
    caplog.clear()
    many = {"root": Holder([Holder(random.Random(each)) for each in range(40)])}
    assert rng.Generators(many, reports=False).made_since() == []
    assert not caplog.records


def test_a_search_calls_no_method_of_the_program() -> None:
    class Rows(list[object]):
        def __iter__(self) -> NoReturn:
            raise AssertionError

        def __len__(self) -> NoReturn:
            raise AssertionError

    assert found_in(Rows([random.Random(1)])) == 1
