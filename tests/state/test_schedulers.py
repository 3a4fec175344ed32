"""Each scheduler of torch continues like an uninterrupted one, and an unnamed one is refused."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler

from flashckpt.errors import MismatchError, StateError
from flashckpt.state.tree import Tree
from tests.state.image import capture, check_continues, restore

S = lr_scheduler


class Decay:
    """A callable object whose attributes are part of a LambdaLR's state."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def __call__(self, step: int) -> float:
        self.rate *= 0.99
        return float(self.rate**step)


def sequential(o: Optimizer) -> S.LRScheduler:
    parts = [S.LinearLR(o, 0.1, total_iters=3), S.ExponentialLR(o, 0.9)]
    return S.SequentialLR(o, parts, milestones=[3])


def chained(o: Optimizer) -> S.LRScheduler:
    return S.ChainedScheduler([S.ConstantLR(o, 0.5, total_iters=4), S.ExponentialLR(o, 0.9)], optimizer=o)


CASES: dict[str, Callable[[Optimizer], S.LRScheduler]] = {
    "ChainedScheduler": chained,
    "ConstantLR": lambda o: S.ConstantLR(o, 0.3, total_iters=4),
    "CosineAnnealingLR": lambda o: S.CosineAnnealingLR(o, 7),
    "CosineAnnealingWarmRestarts": lambda o: S.CosineAnnealingWarmRestarts(o, 3, T_mult=2),
    "CyclicLR": lambda o: S.CyclicLR(o, 0.01, 0.2, step_size_up=3, mode="exp_range", gamma=0.9),
    "CyclicLR-custom": lambda o: S.CyclicLR(o, 0.01, 0.2, step_size_up=3, scale_fn=Decay(0.9)),
    "ExponentialLR": lambda o: S.ExponentialLR(o, 0.9),
    "LambdaLR": lambda o: S.LambdaLR(o, lambda step: 0.9**step),
    "LambdaLR-object": lambda o: S.LambdaLR(o, Decay(0.9)),
    "LinearLR": lambda o: S.LinearLR(o, 0.1, total_iters=5),
    "MultiStepLR": lambda o: S.MultiStepLR(o, [2, 4, 4, 5], gamma=0.5),
    "MultiplicativeLR": lambda o: S.MultiplicativeLR(o, lambda step: 0.9),
    "OneCycleLR": lambda o: S.OneCycleLR(o, 0.5, total_steps=20),
    "PolynomialLR": lambda o: S.PolynomialLR(o, total_iters=6, power=2.0),
    "ReduceLROnPlateau": lambda o: S.ReduceLROnPlateau(o, patience=1, factor=0.5),
    "SequentialLR": sequential,
    "StepLR": lambda o: S.StepLR(o, 2),
}
LRS: dict[str, Callable[[], Any]] = {"float": lambda: 0.1, "tensor": lambda: torch.tensor(0.1)}


def build(case: str, lr: str, seed: int = 0) -> tuple[Tree, nn.Module, Optimizer, Any]:
    torch.manual_seed(seed)
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=LRS[lr](), momentum=0.9)
    scheduler = CASES[case](optimizer)
    return Tree({"model": net, "optimizer": optimizer, "scheduler": scheduler}), net, optimizer, scheduler


def train(net: nn.Module, optimizer: Optimizer, scheduler: Any, steps: range) -> list[str]:
    rates = []
    for step in steps:
        optimizer.zero_grad()
        net(torch.full((2, 3), float(step % 3))).square().sum().backward()
        optimizer.step()
        if isinstance(scheduler, S.ReduceLROnPlateau):
            scheduler.step(1.0 + step % 2)
        else:
            scheduler.step()
        rates.append(float(optimizer.param_groups[0]["lr"]).hex())
    return rates


@pytest.mark.parametrize(
    ("case", "lr"), [*((case, "float") for case in CASES), ("LambdaLR", "tensor"), ("OneCycleLR", "tensor")]
)
def test_training_continues_from_bytes_alone(case: str, lr: str) -> None:
    check_continues(lambda seed: build(case, lr, seed), train, after=range(3, 8))


def test_every_scheduler_of_torch_is_tested() -> None:
    base = S.LRScheduler
    kinds = {
        k
        for k, v in vars(S).items()
        if isinstance(v, type) and issubclass(v, base) and k[0] != "_" and v is not base
    }
    assert kinds <= {case.split("-")[0] for case in CASES}


def test_a_rate_that_is_a_tensor_stays_the_same_tensor() -> None:
    tree, net, optimizer, scheduler = build("StepLR", "tensor")
    train(net, optimizer, scheduler, range(3))
    image = capture(tree)
    train(net, optimizer, scheduler, range(3, 6))
    rate = optimizer.param_groups[0]["lr"]
    restore(tree, image)
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(0.01)


def test_one_of_two_schedulers_that_was_not_named_is_refused() -> None:
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    warmup, decay = S.LinearLR(optimizer, 0.1), S.ExponentialLR(optimizer, 0.9)
    with pytest.raises(StateError, match="LinearLR that is not part of the state.*scheduler="):
        Tree({"model": net, "optimizer": optimizer, "decay": decay})
    Tree({"model": net, "optimizer": optimizer, "decay": decay, "warmup": warmup})


def test_a_scheduler_inside_a_named_object_is_named() -> None:
    class Both:
        def __init__(self, optimizer: Optimizer) -> None:
            self.inner = [S.StepLR(optimizer, 2)]

        def state_dict(self) -> dict[str, Any]:
            return self.inner[0].state_dict()

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.inner[0].load_state_dict(state)

    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    tree = Tree({"model": net, "optimizer": optimizer, "both": Both(optimizer)})
    assert list(tree.names) == ["model", "optimizer", "both"]


def test_a_deleted_scheduler_need_not_be_named() -> None:
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scheduler: Any = S.StepLR(optimizer, 2)
    scheduler.cycle = scheduler
    del scheduler
    gc.disable()
    try:
        assert list(Tree({"model": net, "optimizer": optimizer}).names) == ["model", "optimizer"]
    finally:
        gc.enable()


def test_another_kind_of_scheduler_is_a_difference() -> None:
    tree, *parts = build("StepLR", "float")
    train(*parts, range(2))
    image = capture(tree)
    other, *_ = build("ExponentialLR", "float")
    assert other.differences(image.saved()) == [("scheduler", "StepLR", "ExponentialLR")]
    with pytest.raises(MismatchError):
        other.restore(image.saved())
