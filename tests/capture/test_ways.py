"""Each way, on the simulated accelerator: the exact state of the boundary, or no snapshot."""

import threading
from collections.abc import Callable
from functools import partial
from typing import NoReturn

import numpy as np
import pytest
import torch

from flashckpt import _native
from flashckpt.capture import Verdict, copies
from flashckpt.capture.constants import Constants
from flashckpt.capture.copies import CopyPolicy, Way
from flashckpt.capture.plan import Plan, Sharing
from flashckpt.errors import PersistError
from flashckpt.memory.slot import SlotRing, SlotState
from flashckpt.state.tree import Tree, Walk
from tests.capture.simulated import SimulatedCopying, SimulatedDevice, SimulatedMark, SimulatedStream

from .accelerated import LARGE, Accelerated, Maker, warm
from .content import bytes_of, newest


def test_a_clone_is_in_the_order_of_the_loops_kernels(make: Maker) -> None:
    """The host is ahead of the device: kernels of this iteration have not run at the boundary."""
    loop = warm(make())
    assert loop.ways()["model.a"] == "clone"
    loop.device.compute.hold()
    assert loop.iterate().captured
    loop.kernel(lambda: loop.model.a.data.add_(1))  # the next iteration's
    assert loop.result() == "exact"


def test_the_copy_does_not_start_before_the_loops_kernels_are_done(make: Maker) -> None:
    loop = warm(make(device_memory=0))
    loop.device.compute.hold()
    assert loop.iterate().captured
    assert loop.device.side.pending() > 1  # behind the wait for the compute stream
    assert loop.result() == "exact"


@pytest.mark.parametrize("is_dropped", [False, True])
def test_a_gate_holds_the_next_step_back_until_the_copy_has_ended(make: Maker, is_dropped: bool) -> None:
    """Also of a plan that is dropped meanwhile, because ways are chosen again."""
    loop = warm(make(device_memory=0))
    assert loop.ways()["model.a"] == loop.ways()["optimizer.state.model.a.momentum"] == "gate"
    loop.begin_copies()
    if is_dropped:
        loop.capture._planner.drop()
    loop.train()  # the host continues: forward, backward, step
    loop.device.compute.settle()
    assert loop.device.compute.pending() > 0  # the step waits on the device
    assert loop.result() == "exact"


def _fail(*arguments: object, **named: object) -> NoReturn:
    raise RuntimeError("CUDA error: device-side assert triggered")


def test_a_device_that_fails_before_its_gate_is_closed_raises_nothing_in_a_hook(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = warm(make(device_memory=0))
    loop.begin_copies()
    monkeypatch.setattr(SimulatedCopying, "hold_writers", _fail)
    loop.train()
    loop.device.compute.drain()
    assert loop.result() == "none", "the seal finds what the open gate let through"


@pytest.mark.parametrize("call", ["mark", "elapsed_s"])
def test_a_device_that_fails_at_a_boundary_raises_nothing_there(
    make: Maker, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    loop = warm(make())
    assert loop.iterate().captured
    loop.device.side.drain()
    assert loop.sealer.drain(240)  # the next boundary processes its end
    loop.train()
    monkeypatch.setattr(loop.device, call, _fail)
    loop.capture.pass_by(loop.step + 1)
    monkeypatch.undo()
    loop.step += 1
    assert loop.iterate().captured
    assert loop.result() == "exact"


def test_nothing_is_captured_from_a_device_that_has_failed(make: Maker) -> None:
    loop = warm(make())
    loop.device.graph_capture, loop.device.failure = True, "ILLEGAL_ADDRESS"
    loop.model.zero_grad()
    loop.capture.pass_by(loop.step + 1)
    for due in (True, False):
        with pytest.raises(PersistError, match=r"simulated:0 has failed \(ILLEGAL_ADDRESS\)"):
            loop.capture.boundary(loop.step + 2, lambda: b"{}", due=due)
    loop.device.graph_capture, loop.device.failure = False, ""
    found = loop.ring.newest_sealed()
    assert found[1].step == loop.step


def test_without_hooks_the_digest_finds_the_tear(make: Maker) -> None:
    """A compiled step, or a graph's replay, calls no hook before it writes parameters."""
    loop = warm(make(device_memory=0))
    loop.train()
    loop.device.side.hold()
    assert loop.boundary().captured
    loop.train(hooks=False)
    loop.device.compute.drain()
    assert loop.result() == "none"
    assert loop.capture.report()["snapshots_lost"] == 1


def test_later_captures_compare_leaves_in_turn(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "_COMPARED_BYTES", 1)
    loop = warm(make(device_memory=0), 5)
    captures = 0
    while not loop.capture.report()["snapshots_lost"]:
        assert captures < len(loop.capture._planner.current.on_devices[0]._copied)
        captures += 1
        loop.begin_copies()
        loop.kernel(lambda: loop.model.b.data.add_(1))
        loop.device.compute.drain()
        loop.finish()
    loop.iterate()
    assert loop.result() == "exact"
    assert loop.ways()["model.b"] == "wait"


def test_a_torn_leaf_gets_the_safer_way_and_is_exact(make: Maker, caplog: pytest.LogCaptureFixture) -> None:
    """Embedding(max_norm): the forward pass writes the weight before any step's hook."""
    loop = warm(make(device_memory=0))
    loop.train()
    loop.device.side.hold()
    loop.boundary()
    loop.kernel(lambda: loop.model.a.data.mul_(0.5))
    loop.device.compute.drain()
    caplog.set_level("WARNING", "flashckpt")
    assert loop.result() == "none"
    for _ in range(2):
        loop.train()
        loop.device.compute.drain()
        loop.device.side.drain()
        loop.boundary()
        loop.kernel(lambda: loop.model.a.data.mul_(0.5))
        assert loop.result() == "exact"
    assert loop.ways()["model.a"] == "wait"
    assert [r.getMessage().split()[0] for r in caplog.records] == ["model.a"]


def test_clones_for_which_the_device_has_no_memory_cost_one_snapshot(
    make: Maker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    allocate = SimulatedDevice.allocate

    def scarce(device: SimulatedDevice, num_bytes: int) -> torch.Tensor:
        if num_bytes > LARGE:
            raise torch.OutOfMemoryError("it is full")
        return allocate(device, num_bytes)

    monkeypatch.setattr(SimulatedDevice, "allocate", scarce)
    loop = make(device_memory=1 << 30)
    assert not loop.iterate().captured
    assert "no memory for the clones" in caplog.text
    loop.finish()
    assert loop.iterate().captured


def sharing(make: Maker, device_memory: int) -> Accelerated:
    """One of two ranks of a node, which divide a state that both hold."""
    ranks = Sharing(0, is_divided=True, node=(0, 1), least_bytes=1)
    loop = make(device_memory=device_memory, sharing=ranks)
    walk = loop.state.walk

    def shared(used_up: Callable[..., bool]) -> Walk:
        found = walk(used_up)
        for live in found.leaves:
            live.replicas = (0, 1)
        return found

    loop.state.walk = shared  # type: ignore[method-assign]
    return loop


def test_a_torn_leaf_that_another_rank_holds_later_is_not_sought_in_this_slot(make: Maker) -> None:
    """Ranks of a node divide the leaves anew when one comes: the leaf that was torn is left to another."""
    loop = sharing(make, 0)
    for _ in range(2):
        assert loop.iterate().captured
        loop.finish()
    name = next(name for name, way in loop.ways().items() if way == "gate" and name.startswith("model."))
    loop.begin_copies()
    loop.kernel(lambda: loop.model.get_parameter(name.removeprefix("model.")).data.add_(1))
    loop.device.compute.drain()
    loop.finish()
    assert loop.capture.report()["snapshots_lost"] == 1
    loop.add("big", torch.randn(3 * LARGE))
    loop.state.current = None
    loop.capture._planner.drop()
    for _ in range(6):
        assert loop.iterate().captured
        loop.finish()
    assert loop.ways()[name] == "left"
    assert loop.capture.report()["snapshots_lost"] == 1


@pytest.fixture
def host_waits(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """Let the held side stream continue once the host waits for a mark."""
    happenings: list[Callable[[], object]] = []
    wait = SimulatedMark.wait

    def waits(mark: SimulatedMark) -> None:
        while happenings:
            happenings.pop(0)()
        wait(mark)

    monkeypatch.setattr(SimulatedMark, "wait", waits)
    return happenings


def torn_on_wait(loop: Accelerated, rogue: SimulatedStream) -> torch.Tensor:
    """A teacher with the way `wait` from the start, torn once by an unnamed stream."""
    loop.device.others = (rogue,)
    teacher = loop.add("teacher", torch.randn(LARGE))
    warm(loop)
    assert loop.ways()["more.teacher"] == "wait"
    loop.begin_copies()
    loop.device.compute.settle()
    loop.kernel(lambda: teacher.add_(1), rogue)
    rogue.drain()
    assert loop.result() == "none"
    loop.train()
    loop.device.compute.drain()
    return teacher


def test_the_host_waits_for_a_leaf_torn_on_the_way_wait(
    make: Maker, host_waits: list[Callable[[], object]], caplog: pytest.LogCaptureFixture
) -> None:
    """Events do not hold back an unknown stream; a waiting host enqueues nothing on it."""
    rogue, loop = SimulatedStream("rogue"), make(device_memory=0)
    teacher = torn_on_wait(loop, rogue)
    for _ in range(2):
        loop.device.side.hold()
        host_waits.append(loop.device.side.release)
        assert loop.boundary().captured
        loop.kernel(lambda: teacher.add_(1), rogue)
        rogue.drain()
        assert loop.result() == "exact"
        loop.train()
        loop.device.compute.drain()
    assert [r.getMessage().split()[0] for r in caplog.records] == ["more.teacher"]
    rogue.close()


def test_the_loop_waits_for_leaves_without_a_gate(make: Maker) -> None:
    """An EMA teacher: no gradient, in no optimizer, written at each step by code without a hook."""
    loop = make(device_memory=0)
    teacher = loop.add("teacher", torch.randn(LARGE))
    for _ in range(5):
        loop.train()
        loop.kernel(lambda: teacher.lerp_(loop.model.a.data, 0.1))
        loop.device.compute.drain()
        loop.device.side.hold()
        assert loop.boundary().captured
        loop.kernel(lambda: teacher.add_(1))
        assert loop.result() == "exact"
    assert loop.ways()["more.teacher"] == "wait"


@pytest.mark.parametrize("memory", [1 << 30, 0])
@pytest.mark.parametrize("inside", [True, False])
def test_writes_without_version_counters(make: Maker, memory: int, inside: bool) -> None:
    loop = warm(make(device_memory=memory))
    view = loop.model.a.detach().numpy()
    versions = (loop.model.a._version, loop.model.b._version)
    loop.train()
    loop.kernel(lambda: loop.model.b.data.mul_(1.5))
    loop.kernel(lambda: view.__setitem__(slice(0, 100), 3.0))
    loop.device.compute.drain()
    if inside:
        loop.device.side.hold()
    assert loop.boundary().captured
    if not inside:
        loop.finish()
    loop.kernel(lambda: loop.model.b.data.mul_(1.5))
    loop.kernel(lambda: view.__setitem__(slice(0, 100), 4.0))
    loop.device.compute.drain()
    assert loop.result() == ("none" if inside and not memory else "exact")
    assert versions == (loop.model.a._version, loop.model.b._version)


@pytest.mark.parametrize("memory", [1 << 30, 0])
def test_new_memory_of_a_parameter_while_the_old_is_copied(make: Maker, memory: int) -> None:
    loop = warm(make(device_memory=memory))
    loop.train()
    loop.device.side.hold()
    assert loop.boundary().captured
    fresh = torch.randn(LARGE)
    loop.device.adopt(fresh)
    old = loop.model.a.data.data_ptr()
    loop.model.a.data = fresh  # the old memory has no other owner now
    rubbish = [torch.full((LARGE,), 9.0) for _ in range(8)]
    if not memory:
        assert old not in [each.data_ptr() for each in rubbish]
    assert loop.result() == "exact"
    loop.iterate()
    assert loop.result() == "exact"


def test_small_leaves_are_cloned_without_an_option(make: Maker) -> None:
    loop = warm(make(device_memory=0))
    ways = loop.ways()
    assert ways["model.small"] == ways["model.brief"] == "clone"
    assert ways["optimizer.state.model.a.step"] == "host"
    loop.device.side.hold()
    loop.boundary(ordered=True)
    loop.kernel(lambda: loop.model.small.add_(1))
    loop.kernel(lambda: loop.model.brief.add_(1))
    assert loop.result() == "exact"


def test_leaves_that_are_not_row_major_are_made_so_on_the_device(make: Maker) -> None:
    loop = make()
    loop.add("transposed", torch.randn(700, 500).t())
    loop.add("odd", torch.randint(0, 255, (1_100_001,), dtype=torch.uint8))
    loop.add("bytes", torch.randint(0, 255, (3,), dtype=torch.uint8))
    loop.add("wide", torch.randn(5, dtype=torch.complex128))
    loop.add("none", torch.empty(0))
    loop.add("shifted", torch.randn(9).to(torch.bfloat16)[1:])
    for _ in range(4):
        loop.iterate()
        assert loop.result() == "exact"


def test_a_leaf_that_moves_to_an_odd_address_keeps_its_own_digest(make: Maker) -> None:
    """As a view into a flat buffer; leaves are digested and copied in place."""
    loop = make(device_memory=0)
    half = torch.nn.Parameter(torch.randn(4 * LARGE).to(torch.bfloat16), requires_grad=False)
    loop.model.register_parameter("early", half)
    loop.device.adopt(half)
    warm(loop, 2)
    moved = torch.empty(4 * LARGE + 2, dtype=torch.bfloat16)[1:-1]
    moved.copy_(half.data)
    loop.device.adopt(moved)
    half.data = moved
    for _ in range(3):
        loop.iterate()
        assert loop.result() == "exact"


@pytest.mark.parametrize("memory", [1 << 30, 0])
def test_named_streams_are_waited_for_and_held(make: Maker, memory: int) -> None:
    named = SimulatedStream("named")
    loop = make(device_memory=memory, streams=(named,))
    warm(loop)
    loop.train()
    loop.device.compute.drain()
    named.hold()
    loop.kernel(lambda: loop.model.small.add_(1), named)
    expected = loop.model.small + 1
    assert loop.boundary().captured
    loop.kernel(lambda: loop.model.small.add_(5), named)  # after the boundary
    loop.device.compute.settle()
    named.release()
    named.drain()
    loop.finish()
    content = newest(loop.ring)
    assert content.step == loop.step
    assert content.torn == []
    assert content.leaves["model.small"] == bytes_of(expected)
    named.close()


def test_a_copy_that_is_still_running_skips_the_next_boundary(make: Maker) -> None:
    loop = warm(make())
    loop.device.side.hold()
    assert loop.iterate().captured
    outcome = loop.iterate()
    assert outcome.verdict is Verdict.SKIPPED
    assert "still running" in outcome.reason
    loop.device.side.release()
    outcome = loop.iterate(ordered=True)  # an order waits for it, and only an order
    assert outcome.captured
    assert loop.result() == "exact"


def test_nothing_is_enqueued_or_queried_while_a_graph_is_captured(make: Maker) -> None:
    """Also once the copies have ended: a query of an event would invalidate the user's graph."""
    loop = warm(make(device_memory=0))
    loop.device.side.hold()
    loop.iterate()
    loop.device.graph_capture = True  # any use of the device fails from here on
    before = loop.capture.hooks.used_up(loop.model.a, loop.model.a.grad)
    loop.optimizer.step()
    assert loop.capture.boundary(99, lambda: b"{}").verdict in (Verdict.NOT_QUALIFIED, Verdict.SKIPPED)
    assert before
    loop.device.side.release()
    loop.device.side.drain()
    assert loop.sealer.drain(240)
    assert loop.capture.boundary(99, lambda: b"{}").verdict is not Verdict.CAPTURED
    loop.device.graph_capture = False
    loop.finish()
    assert loop.iterate().captured
    assert loop.result() == "exact"


def test_a_device_without_memory_skips_snapshots_and_the_run_continues(make: Maker) -> None:
    loop = make()
    loop.device.out_of_memory = True
    outcome = loop.iterate()
    assert outcome.verdict is Verdict.SKIPPED
    assert "memory" in outcome.reason
    loop.device.out_of_memory = False
    warm(loop)


def test_without_the_kernel_the_host_waits_for_the_devices_kernels(make: Maker) -> None:
    loop = make()
    loop.device.has_kernel = False
    loop.add("odd", torch.randint(0, 255, (1_100_001,), dtype=torch.uint8))
    loop.add("transposed", torch.randn(700, 500).t())
    for _ in range(4):
        loop.device.compute.hold()
        threading.Timer(0.05, loop.device.compute.release).start()
        assert loop.iterate(ordered=True).captured
        loop.kernel(lambda: loop.model.a.data.add_(1))  # the next iteration's
        assert loop.result() == "exact"
    assert set(loop.ways().values()) == {"host"}


def test_running_copies_end_before_the_slot_of_a_failed_capture_is_freed(
    make: Maker, ring: SlotRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A late copy would write into the next snapshot. If the device cannot be waited for, its copies can."""
    loop = warm(make())
    loop.train()
    loop.device.compute.drain()
    loop.device.side.hold()
    states: list[SlotState] = []

    def refuses(*args: object, **named: object) -> None:
        states.extend(slot.state().state for slot in ring.slots)
        loop.device.side.release()
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(loop.device, "synchronize", _fail)
        patch.setattr(loop.capture._planner.current.host, "capture", refuses)
        with pytest.raises(MemoryError):
            loop.boundary()
    assert SlotState.WRITING in states
    assert loop.device.side.pending() == 0
    assert SlotState.WRITING not in [slot.state().state for slot in ring.slots]
    loop.capture._planner.drop()
    loop.iterate()
    assert loop.result() == "exact"


def test_slots_are_registered_while_they_are_used(make: Maker, ring: SlotRing) -> None:
    loop = make()
    loop.capture.register(ring.slots)  # registered before they are used, and only once
    sizes = {_native.address_of(slot.mapping): slot.header.num_bytes for slot in ring.slots}
    assert loop.device.registered == sizes


@pytest.mark.parametrize("case", ["compute stream", "moved", "named stream"])
def test_host_memory_that_the_device_writes_is_read_after_its_kernels(make: Maker, case: str) -> None:
    """copy_(non_blocking=True) into pinned memory, or an offloader's own stream: the host is ahead of the
    bytes."""
    named = SimulatedStream("offload")
    loop = make(streams=(named,))
    stream = named if case == "named stream" else loop.device.compute
    offloaded = torch.zeros(5000)
    loop.state.more["offloaded"] = offloaded
    if case != "moved":
        loop.device.pin(offloaded)
    warm(loop)
    if case == "moved":
        offloaded = loop.state.more["offloaded"] = torch.zeros(5000)
        loop.device.pin(offloaded)
    loop.device.compute.drain()
    stream.hold()
    loop.kernel(lambda: offloaded.add_(7), stream)
    released = threading.Timer(0.1, stream.release)
    released.start()
    assert loop.boundary(ordered=True).captured
    released.join()
    loop.finish()
    assert newest(loop.ring).leaves["more.offloaded"] == bytes_of(torch.full((5000,), 7.0))
    named.close()


def test_without_a_hook_before_the_boundary_the_loop_waits_for_copies_of_gated_leaves(make: Maker) -> None:
    """The last writer called no hook, and may write again without one."""
    loop = warm(make(device_memory=0))
    assert loop.ways()["model.a"] == "gate"
    loop.train(hooks=False)
    loop.device.compute.drain()
    loop.device.side.hold()
    assert loop.boundary(ordered=True).captured
    loop.train(hooks=False)
    loop.device.compute.settle()
    assert loop.device.compute.pending() > 0, "the write waits for the copies"
    assert loop.result() == "exact"


class Scaled(torch.Tensor):
    """A tensor of two tensors: its forward pass may write one of them."""

    inner: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor, scale: torch.Tensor) -> "Scaled":
        made: Scaled = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        made.inner, made.scale = inner, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], *_: object) -> "Scaled":
        return Scaled(inner["inner"], inner["scale"])

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable[..., object], types: object, args: tuple[object, ...] = (), kwargs: object = None
    ) -> object:
        return args[0] if func is torch.ops.aten.detach.default else NotImplemented


@pytest.mark.dist
@pytest.mark.filterwarnings("ignore")
def test_leaves_of_optimizers_whose_hooks_were_seen_are_gated() -> None:
    """Plain parameters, FSDP2's and those of a mesh; other wrapping tensors are not, nor what an optimizer
    without hooks (a compiled one) writes too, nor a torn leaf."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    device = SimulatedDevice()
    try:
        mesh, model = init_device_mesh("cpu", (1,)), torch.nn.Module()
        for name in ("fires", "silent", "alone", "both", "torn"):
            part = distribute_tensor(torch.randn(LARGE), mesh, [Shard(0)])
            model.register_parameter(name, torch.nn.Parameter(part))
        model.scaled = torch.nn.Parameter(Scaled(torch.randn(LARGE), torch.randn(LARGE)))
        model.plain = torch.nn.Parameter(torch.randn(LARGE))
        model.fsdp = fully_shard(torch.nn.Linear(LARGE, 1, bias=False), mesh=mesh)
        owned = [model.fires, model.scaled, model.plain, model.both, model.torn, *model.fsdp.parameters()]
        fires = torch.optim.SGD(owned, lr=0.1)
        optimizers = [fires, torch.optim.SGD([model.silent, model.both], lr=0.1)]
        tree = Tree({"model": model, "optimizer": fires})
        plan = Plan(tree.walk(lambda *_: True))
        policy = CopyPolicy(optimizers, Constants(optimizers, [device], 1, {}, (), None))
        assert policy.tear("model.torn", Way.HOST)
        assert not policy.tear("model.torn", Way.GATE), "there is no safer way"
        ways = policy.choose(plan, [device] * len(plan.leaves), frozenset({id(fires)}), 0)
        found = {leaf.name: way.value for leaf, way in zip(plan.leaves, ways, strict=True)}
        gated = ["model.fires", "model.fsdp.weight", "model.plain"]
        assert sorted(name for name, way in found.items() if way == "gate") == gated
        waits = ["alone", "both", "scaled.inner", "scaled.scale", "silent", "torn"]
        assert sorted(name for name, way in found.items() if way == "wait") == [f"model.{n}" for n in waits]
        plan.release()
    finally:
        device.shutdown()
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("memory", [0, 1 << 30])
def test_leaves_of_another_rank_are_digested_in_order_and_not_copied(
    make: Maker, ring: SlotRing, memory: int
) -> None:
    loop = sharing(make, memory)
    left: set[str] = set()
    for _ in range(4):
        loop.device.compute.hold()
        assert loop.iterate().captured
        for name in {"model.a", "model.b"} & left:  # these have no gate and need none
            loop.kernel(partial(loop.model.get_parameter(name[-1]).data.add_, 1))
        loop.finish()
        found = ring.newest_sealed()
        slot, sealed = found
        assert sealed.step == loop.step
        metadata, reference = slot.metadata(sealed), loop.references[loop.step]
        image = metadata.image
        rows = list(zip(image.leaves, image.starts(), metadata.digests, strict=True))
        assert {leaf.name for leaf, _, _ in rows} == reference.keys()
        for leaf, _, digest in rows:
            buffer = np.frombuffer(reference[leaf.name], dtype=np.uint8)
            assert digest == _native.digest(_native.address_of(buffer), leaf.num_bytes)
        for leaf, start, _ in rows[: image.first_left]:
            assert bytes(slot.image_view[start : start + leaf.num_bytes]) == reference[leaf.name]
        left = {leaf.name for leaf, _, _ in rows[image.first_left :]}
        assert {"model.a", "model.b"} & left, "a large one"
        assert {name for name, way in loop.ways().items() if way == "left"} == left
