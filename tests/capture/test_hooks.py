"""Step hooks: qualification of boundaries, used-up gradients, and the order among other hooks."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from flashckpt.capture.hooks import Habit, StepHooks


def parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(3))


def backward(p: torch.nn.Parameter) -> None:
    (p * 2).sum().backward()


def dropping(*optimizers: torch.optim.Optimizer) -> StepHooks:
    """Hooks of a loop that is known to drop used-up gradients."""
    hooks = StepHooks(optimizers)
    hooks.resume(dict.fromkeys(hooks.habits, Habit.DROPPED))
    return hooks


def used_up(hooks: StepHooks, p: torch.nn.Parameter) -> bool:
    assert p.grad is not None
    return hooks.used_up(p, p.grad)


def test_another_gradient_in_its_place_is_not_used_up() -> None:
    """A new object may reuse the memory, and so the id, of the old one, at the same version."""
    p = parameter()
    optimizer = torch.optim.SGD([p], lr=0.1)
    hooks = dropping(optimizer)
    p.grad = torch.ones(3)
    optimizer.step()
    assert used_up(hooks, p)
    before, p.grad = id(p.grad), None
    kept = []
    for _ in range(10_000):
        kept.append(torch.ones(3))
        if id(kept[-1]) == before:
            break
    assert id(kept[-1]) == before
    p.grad = kept[-1]
    assert not used_up(hooks, p)


def test_gradients_are_not_kept_alive() -> None:
    p = parameter()
    optimizer = torch.optim.SGD([p], lr=0.1)
    hooks = dropping(optimizer)
    backward(p)
    optimizer.step()
    gradient = weakref.ref(p.grad)
    optimizer.zero_grad()
    gc.collect()
    assert gradient() is None
    assert hooks.fired


def test_boundaries_qualify_when_some_optimizer_stepped() -> None:
    p = parameter()
    optimizer = torch.optim.SGD([p], lr=0.1)
    hooks = StepHooks([optimizer])
    results = []
    for iteration in range(8):
        backward(p)
        if iteration % 4 == 3:
            optimizer.step()
        results.append(hooks.boundary())
    assert [each.qualifies for each in results] == [False] * 3 + [True] + [False] * 3 + [True]
    assert results[3].gated


def test_missing_hooks_only_delay() -> None:
    p = parameter()
    optimizer = torch.optim.SGD([p], lr=0.1)
    hooks = StepHooks([optimizer])
    results = [hooks.boundary() for _ in range(12)]
    assert [each.qualifies for each in results] == [False] * 7 + [True] * 5
    assert not any(each.gated for each in results)
    optimizer.step()
    assert hooks.boundary().gated  # they came back
    for _ in range(25):
        assert not hooks.boundary().qualifies  # twice the longest gap seen, 13
    assert hooks.boundary().qualifies


def test_a_state_without_optimizers_always_qualifies() -> None:
    results = StepHooks([]).boundary()
    assert results.qualifies
    assert not results.gated


def test_our_hook_comes_before_the_users_earlier_one() -> None:
    p = parameter()
    optimizer = torch.optim.SGD([p], lr=0.1)
    order = []
    optimizer.register_step_pre_hook(lambda *_: order.append("user"))

    def close() -> None:
        order.append("gate")

    hooks = StepHooks([optimizer], close)
    backward(p)
    optimizer.step()
    assert order == ["gate", "user"]
    hooks.close()
    optimizer.step()
    assert order == ["gate", "user", "user"]


def test_hooks_keep_no_object_alive_and_end_with_their_owner() -> None:
    p = parameter()
    optimizer = torch.optim.SGD([p], lr=0.1)
    hooks = StepHooks([optimizer])
    alive = weakref.ref(hooks)
    del hooks
    gc.collect()
    assert alive() is None
    backward(p)
    optimizer.step()  # the hooks are still there, and do nothing


def test_hooks_are_silent_in_graphs_and_compilation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    p = parameter()
    optimizer = torch.optim.SGD([p], lr=0.1)
    called, capturing = [], [True]

    def close() -> None:
        called.append(1)

    hooks = StepHooks([optimizer], close, [SimpleNamespace(capturing=lambda: capturing[0])])
    backward(p)
    optimizer.step()
    assert not called
    assert not hooks.fired
    capturing[0] = False
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    optimizer.step()
    assert not called


def test_a_step_that_a_scaler_skips_is_no_step() -> None:
    p = parameter()
    optimizer = torch.optim.SGD([p], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    hooks = StepHooks([optimizer])
    (scaler.scale((p * float("inf")).sum())).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not hooks.boundary().qualifies
    assert not used_up(hooks, p)
    optimizer.zero_grad()
    scaler.scale((p * 2).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert hooks.boundary().qualifies
