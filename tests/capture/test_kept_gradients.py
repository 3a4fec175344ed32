"""Which gradients the next iteration reads: loops that keep the same tensors, and loops that drop them."""

import logging
from collections.abc import Callable

import pytest
import torch
from torch import nn

from flashckpt.capture import hooks as step_hooks
from flashckpt.capture.hooks import Habit, StepHooks

Iteration = Callable[["Loop", int], None]


class Loop:
    """A model, its optimizer and the hooks on it; `saved` are the gradients in the snapshot of each boundary,
    and `needed` those that the loop reads in the iteration after it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.hooks = StepHooks([self.optimizer])

    def train(self) -> None:
        self.model(torch.randn(4, 3)).square().mean().backward()
        self.optimizer.step()

    def boundary(self) -> int:
        """Return how many gradients a snapshot of this boundary holds."""
        self.hooks.boundary()
        found = [p for p in self.model.parameters() if p.grad is not None]
        return sum(not self.hooks.used_up(p, p.grad) for p in found)

    @property
    def habit(self) -> str:
        return self.hooks.habits[id(self.optimizer)]


def run(iteration: Iteration, count: int) -> tuple[Loop, list[int]]:
    loop = Loop()
    saved = []
    for number in range(count):
        iteration(loop, number)
        saved.append(loop.boundary())
    return loop, saved


def never(loop: Loop, number: int) -> None:
    loop.train()


def not_to_none(loop: Loop, number: int) -> None:
    loop.optimizer.zero_grad(set_to_none=False)
    loop.train()


def at_the_head(loop: Loop, number: int) -> None:
    loop.optimizer.zero_grad()
    loop.train()


def at_the_end(loop: Loop, number: int) -> None:
    loop.train()
    loop.optimizer.zero_grad()


def accumulating(loop: Loop, number: int) -> None:
    """In the middle of it the same tensors persist and are still to be used."""
    if number % 3 == 0:
        loop.optimizer.zero_grad()
    loop.model(torch.randn(4, 3)).square().mean().backward()
    if number % 3 == 2:
        loop.optimizer.step()


@pytest.mark.parametrize(
    ("iteration", "expected", "habit"),
    [
        (never, [2] * 6, Habit.KEPT),
        (not_to_none, [2] * 6, Habit.KEPT),
        (at_the_head, [2, 2, 0, 0, 0, 0], Habit.DROPPED),
        (at_the_end, [0] * 4, Habit.UNDECIDED),
        (accumulating, [2, 2, 2, 2, 2, 2, 2, 2, 0, 2, 2, 0], Habit.DROPPED),
    ],
)
def test_gradients_are_saved_until_it_is_known_that_they_are_dropped(
    iteration: Iteration, expected: list[int], habit: str
) -> None:
    loop, saved = run(iteration, len(expected))
    assert saved == expected
    assert loop.habit == habit


@pytest.mark.parametrize("at_head", [True, False])
@pytest.mark.parametrize("phase", [0, 1, 2])
def test_a_loop_that_drops_them_every_third_iteration(phase: int, at_head: bool) -> None:
    """Each gradient that exists at a boundary is saved, whichever iteration drops it."""

    def iteration(loop: Loop, number: int) -> None:
        drops = number % 3 == phase
        if drops and at_head:
            loop.optimizer.zero_grad()
        loop.train()
        if drops and not at_head:
            loop.optimizer.zero_grad()

    loop, saved = run(iteration, 9)
    there = [2 if at_head or number % 3 != phase else 0 for number in range(9)]
    assert saved == there
    assert loop.habit == Habit.KEPT


def test_a_boundary_without_an_iteration_decides_nothing() -> None:
    """As at the end of an epoch, after its last batch: the same gradients, without training."""
    loop = Loop()
    for _ in range(6):
        loop.optimizer.zero_grad()
        loop.train()
        loop.boundary()
        saved = loop.boundary()
    assert saved == 0
    assert loop.habit == Habit.DROPPED


def test_gradients_of_an_optimizer_that_pauses_while_another_one_steps() -> None:
    """An iteration that trains another model may read them."""
    loop = Loop()
    other = nn.Linear(3, 2)
    stepping = torch.optim.SGD(other.parameters(), lr=0.1)
    hooks = loop.hooks = StepHooks([loop.optimizer, stepping])
    for number in range(8):
        stepping.zero_grad()
        other(torch.randn(4, 3)).sum().backward()
        stepping.step()
        if number % 4 == 0:
            loop.optimizer.zero_grad()
            loop.train()
        assert loop.boundary() == 2
    assert hooks.habits == {id(loop.optimizer): Habit.KEPT, id(stepping): Habit.DROPPED}


def test_a_loop_that_begins_to_keep_them_is_detected_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    def iteration(loop: Loop, number: int) -> None:
        if number < 5:
            loop.optimizer.zero_grad()
        loop.train()

    with caplog.at_level(logging.WARNING):
        _, saved = run(iteration, 8)
    assert saved == [2, 2, 0, 0, 0, 2, 2, 2]
    [record] = caplog.records
    assert "32 bytes of gradients of SGD are saved with each snapshot" in record.getMessage()
    assert "Earlier snapshots of this run do not contain them" in record.getMessage()


def test_the_warning_for_views_names_ddp(caplog: pytest.LogCaptureFixture) -> None:
    """With gradient_as_bucket_view=True, DDP restores the same tensors after zero_grad."""
    loop = Loop()
    views = [torch.zeros(p.numel() + 1)[1:].view_as(p) for p in loop.model.parameters()]
    for _ in range(3):
        loop.optimizer.zero_grad()
        for p, view in zip(loop.model.parameters(), views, strict=True):
            p.grad = view
        loop.optimizer.step()
        assert loop.boundary() == 2
    [record] = caplog.records
    assert "gradient_as_bucket_view=False" in record.getMessage()


def test_a_resumed_loop_that_kept_them_keeps_them_in_any_phase_of_its_cycle() -> None:
    loop = Loop()
    loop.hooks.resume({id(loop.optimizer): Habit.KEPT})
    for _ in range(3):
        loop.optimizer.zero_grad()
        loop.train()
        assert loop.boundary() == 2


def test_many_bytes_of_gradients_wait_for_the_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots that held them would stay that large until the run ends, although the loop may never read
    them."""
    monkeypatch.setattr(step_hooks, "_MOST_UNDECIDED_BYTES", 16)
    loop, qualifies = Loop(), []
    for _ in range(4):
        loop.optimizer.zero_grad()
        loop.train()
        qualifies.append(loop.hooks.boundary().qualifies)
    assert qualifies == [False, False, True, True]


def test_gradients_of_local_parts_have_their_own_version() -> None:
    """FSDP2 adds to the local tensor of a gradient, which does not change the DTensor's version."""

    class Sharded(torch.Tensor):
        _local_tensor: torch.Tensor

    loop = Loop()
    loop.hooks.resume({id(loop.optimizer): Habit.DROPPED})
    loop.train()
    weight = loop.model.weight
    gradient = torch.randn(2, 3).as_subclass(Sharded)
    gradient._local_tensor = torch.randn(2, 3)
    weight.grad = gradient
    loop.optimizer.step()
    assert loop.hooks.used_up(weight, weight.grad)
    gradient._local_tensor += 1
    assert not loop.hooks.used_up(weight, weight.grad)
