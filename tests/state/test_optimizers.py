"""Each optimizer of torch continues from bytes alone like an uninterrupted one."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flashckpt.errors import StateError
from flashckpt.state.tree import Tree
from tests.restore.layouts import one_of
from tests.state.image import all_used_up, assert_same, capture, check_continues, restore

Make = Callable[[list[Tensor]], Optimizer]

O = torch.optim  # noqa: E741


def variants() -> Iterator[tuple[str, Make]]:
    yield "Adadelta", lambda p: O.Adadelta(p, weight_decay=0.1)
    yield "Adafactor", lambda p: O.Adafactor(p)
    yield "Adagrad", lambda p: O.Adagrad(p, lr_decay=0.1, initial_accumulator_value=0.2)
    yield "Adam", lambda p: O.Adam(p)
    yield "Adam-amsgrad", lambda p: O.Adam(p, amsgrad=True, maximize=True)
    yield "Adam-fused", lambda p: O.Adam(p, fused=True)
    yield "Adam-tensor-lr", lambda p: O.Adam(p, lr=torch.tensor(0.01), foreach=False)
    yield "AdamW-foreach", lambda p: O.AdamW(p, amsgrad=True, foreach=True)
    yield "Adamax", lambda p: O.Adamax(p)
    yield "ASGD", lambda p: O.ASGD(p, t0=2)
    yield "LBFGS", lambda p: O.LBFGS(p, lr=0.1, max_iter=4, history_size=3)
    yield "LBFGS-wolfe", lambda p: O.LBFGS(p, max_iter=3, history_size=2, line_search_fn="strong_wolfe")
    if hasattr(O, "Muon"):
        yield "Muon", lambda p: O.Muon(p, lr=0.1)
    yield "NAdam", lambda p: O.NAdam(p, decoupled_weight_decay=True, weight_decay=0.1)
    yield "RAdam", lambda p: O.RAdam(p)
    yield "RMSprop", lambda p: O.RMSprop(p, centered=True, momentum=0.9)
    yield "Rprop", lambda p: O.Rprop(p)
    yield "SGD", lambda p: O.SGD(p, lr=0.1)
    yield "SGD-momentum", lambda p: O.SGD(p, lr=0.1, momentum=0.9, nesterov=True)
    yield "groups", lambda p: O.AdamW([{"params": p[:1], "lr": 0.1}, {"params": p[1:], "betas": (0.5, 0.6)}])


CASES = dict(variants())


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype, bias: bool) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7, dtype=dtype, bias=bias)
        self.second = nn.Linear(7, 3, dtype=dtype, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def build(case: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tree, Net, Optimizer]:
    torch.manual_seed(seed)
    net = Net(dtype, bias=case != "Muon")  # which takes only matrices
    optimizer = CASES[case](list(net.parameters()))
    return Tree({"model": net, "optimizer": optimizer}), net, optimizer


def train(net: nn.Module, optimizer: Optimizer, steps: range, dtype: torch.dtype = torch.float32) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(4, 5, generator=generator).to(dtype)
        y = torch.randn(4, 3, generator=generator).to(dtype)

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss: Any = (net(x) - y).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)


@pytest.mark.parametrize("case", CASES)
def test_training_continues_from_bytes_alone(case: str) -> None:
    check_continues(lambda seed: build(case, seed=seed), train)


@pytest.mark.parametrize("case", ["Adam", "SGD-momentum", "Adafactor"])
def test_state_keeps_its_dtype(case: str) -> None:
    """float32 state of bfloat16 parameters (a common choice) is not cast to the parameter's dtype."""
    dtype = torch.bfloat16
    tree, net, optimizer = build(case, dtype)
    train(net, optimizer, range(2), dtype)
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dtype is torch.bfloat16:
                state[key] = value.float() + 1e-6
    image = capture(tree)
    again, net2, optimizer2 = build(case, dtype, seed=9)
    restore(again, image)
    assert_same(tree, again, all_used_up)
    for p, q in zip(net.parameters(), net2.parameters(), strict=True):
        for key, value in optimizer.state[p].items():
            assert optimizer2.state[q][key].dtype is value.dtype


def test_a_restore_replaces_the_whole_trained_state() -> None:
    tree, net, optimizer = build("Adam-amsgrad")
    train(net, optimizer, range(2))
    image = capture(tree)
    train(net, optimizer, range(2, 5))
    kept = optimizer.state[net.first.weight]["exp_avg"]
    restore(tree, image)
    assert optimizer.state[net.first.weight]["exp_avg"] is kept, "filled in place"
    again, _, _ = build("Adam-amsgrad", seed=9)
    restore(again, image)
    assert_same(tree, again, all_used_up)


def test_state_missing_from_the_snapshot_is_removed() -> None:
    fresh, net, optimizer = build("Adam")
    image = capture(fresh)
    train(net, optimizer, range(2))
    restore(fresh, image)
    assert not optimizer.state


def test_sparse_adam() -> None:
    def make(seed: int) -> tuple[Tree, nn.Embedding, Optimizer]:
        torch.manual_seed(seed)
        table = nn.Embedding(10, 3, sparse=True)
        optimizer = O.SparseAdam(list(table.parameters()))
        return Tree({"table": table, "optimizer": optimizer}), table, optimizer

    def steps(table: nn.Embedding, optimizer: Optimizer, numbers: range) -> None:
        for step in numbers:
            optimizer.zero_grad()
            table(torch.tensor([step, 2 * step])).square().sum().backward()
            optimizer.step()

    check_continues(make, steps, after=range(3, 5))


def test_every_optimizer_of_torch_is_tested() -> None:
    kinds = {k for k, v in vars(O).items() if isinstance(v, type) and issubclass(v, Optimizer)}
    tested = {name.split("-")[0] for name in CASES} | {"SparseAdam", "Optimizer"}
    assert kinds <= tested


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of importing it
def test_a_zero_redundancy_optimizer_is_refused_by_name() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    class Derived(ZeroRedundancyOptimizer):
        pass

    net = nn.Linear(4, 2)
    for kind in (ZeroRedundancyOptimizer, Derived):
        with one_of(2, 0):
            optimizer = kind(net.parameters(), O.AdamW, lr=0.1)
            with pytest.raises(StateError, match=r"ZeroRedundancyOptimizer.*FSDP2"):
                Tree({"model": net, "optimizer": optimizer})
