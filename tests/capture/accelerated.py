"""A training loop on the simulated accelerator, which the tests of device ways drive step by step. The
compute stream itself records the reference of each boundary, in its order: a snapshot of that step must equal
it exactly, or must not exist."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashckpt import _native
from flashckpt.capture import BoundaryResult, Capture
from flashckpt.capture.schedule import Pace
from flashckpt.memory.slot import SlotRing
from flashckpt.options import Options
from tests.capture.simulated import SimulatedDevice, SimulatedStream

from .content import State, bytes_of, newest, resumed_dropping

LARGE = 300_000  # elements of float32: above a mebibyte, so that it is not cloned for being small


class Descent(torch.optim.Optimizer):
    """Momentum on the simulated device: `step` calls hooks and enqueues, `write` only enqueues, as a
    compiled step or a graph's replay does. Version counters do not move, as in fused optimizers."""

    def __init__(self, parameters: list[Tensor], device: SimulatedDevice) -> None:
        super().__init__(parameters, {"lr": 0.5})
        self.device = device

    def step(self, closure: Any = None) -> None:
        self.write()

    def write(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state["momentum"] = torch.zeros_like(parameter)
                state["step"] = torch.zeros(())
                self.device.adopt(state["momentum"])
            state["step"] += 1
            self.device.compute.enqueue(_update(parameter.data, parameter.grad.data, state["momentum"].data))


def _update(parameter: Tensor, gradient: Tensor, momentum: Tensor) -> Callable[[], None]:
    def update() -> None:
        momentum.mul_(0.9).add_(gradient)
        parameter.sub_(momentum, alpha=0.5)

    return update


class Accelerated:
    """A model of two weights, a teacher that follows it, small buffers, and an optimizer, on one device."""

    def __init__(
        self,
        ring: SlotRing,
        sealer: _native.Sealer,
        *,
        streams: tuple[Any, ...] = (),
        device_memory: int = 1 << 30,
        **options: Any,
    ) -> None:
        torch.manual_seed(1)
        self.device = SimulatedDevice(piece_bytes=128 << 10, streams=streams)
        self.model = torch.nn.Module()
        for name in ("a", "b"):
            self.model.register_parameter(name, torch.nn.Parameter(torch.randn(LARGE)))
        self.model.register_buffer("small", torch.randn(7))
        self.model.register_buffer("brief", torch.randn(5).to(torch.bfloat16))
        self.device.adopt(*self.model.parameters(), *self.model.buffers())
        self.optimizer = Descent([self.model.a, self.model.b], self.device)
        self.state = State(model=self.model, optimizer=self.optimizer)
        self.ring, self.sealer, self.step = ring, sealer, 0
        self.references: dict[int, dict[str, bytes]] = {}
        options.setdefault("schedule", Pace(1))
        self.capture = Capture(
            self.state,
            ring,
            sealer,
            Options(device_memory=device_memory),
            [self.device],
            optimizers=self.state.optimizers,
            **options,
        )
        resumed_dropping(self.capture)

    def add(self, name: str, tensor: Tensor) -> Tensor:
        """One more tensor of the state, on the device."""
        self.device.adopt(tensor)
        self.state.more[name] = tensor
        return tensor

    def kernel(self, work: Callable[[], Any], stream: SimulatedStream | None = None) -> None:
        (stream or self.device.compute).enqueue(work)

    def backward(self) -> None:
        for parameter in self.model.parameters():
            gradient = torch.randn_like(parameter)
            self.device.adopt(gradient)
            parameter.grad = gradient

    def train(self, *, hooks: bool = True) -> None:
        self.optimizer.zero_grad()
        self.backward()
        if hooks:
            self.optimizer.step()
        else:
            self.optimizer.write()

    def boundary(self, **how: Any) -> BoundaryResult:
        self.step += 1
        step, host, device = self.step, {}, {}
        for live in self.state.walk_now():
            if self.device.holds(live.tensor):
                device[live.name] = live.tensor.detach()
            else:
                host[live.name] = bytes_of(live.tensor)

        def refer() -> None:
            self.references[step] = host | {name: bytes_of(tensor) for name, tensor in device.items()}

        self.kernel(refer)
        return self.capture.boundary(step, lambda: b"{}", **how)

    def iterate(self, **how: Any) -> BoundaryResult:
        self.train()
        return self.boundary(**how)

    def begin_copies(self) -> None:
        """Train, and capture a boundary whose copies to the host stand still."""
        self.train()
        self.device.compute.drain()
        self.device.side.hold()
        assert self.boundary().captured

    def finish(self) -> None:
        """Finish all running work, and let the capture process the results."""
        self.device.side.release()
        self.device.compute.release()
        self.device.side.drain()
        self.device.compute.drain()
        assert self.sealer.drain(240)
        self.capture._in_flight.poll()

    def result(self) -> str:
        """Return "exact" or "none". Fails here for a snapshot that is not the boundary's state."""
        self.finish()
        found = self.ring.newest_sealed()
        if found is None or found[1].step != self.step:
            return "none"
        content = newest(self.ring)
        gradients = {name for name in content.leaves if name.startswith("gradients.")}
        leaves = {name: data for name, data in content.leaves.items() if name not in gradients}
        assert leaves == self.references[content.step]
        assert content.torn == []
        return "exact"

    def ways(self) -> dict[str, str]:
        arrangement = self.capture._planner.current
        rows = enumerate(zip(arrangement.names, arrangement.ways, strict=True))
        outdated = arrangement.plan.outdated
        return {name: way.value for index, (name, way) in rows if index not in outdated}

    def close(self) -> None:
        self.finish()
        self.capture.close()
        self.device.shutdown()


Maker = Callable[..., Accelerated]


def warm(loop: Accelerated, boundaries: int = 3) -> Accelerated:
    for _ in range(boundaries):
        loop.iterate()
        assert loop.result() == "exact"
    return loop
