"""Constants: stored once, in a region; digested at every capture; ordinary after one difference."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flashckpt import _native
from flashckpt.capture import Capture
from flashckpt.capture.plan import ConstantsRegion, Sharing
from flashckpt.capture.schedule import Pace
from flashckpt.memory.slot import Slot, SlotRing, SlotState
from flashckpt.options import Options
from flashckpt.state.tree import Tree

from .accelerated import LARGE, Accelerated
from .content import Content, State, bytes_of, give_region, make_region, newest


class Frozen(State):
    """A state with parameters that have no gradient and are in no optimizer, and one small tensor."""

    def __init__(self, *weights: torch.Tensor) -> None:
        self.frozen = torch.nn.Module()
        for i, weight in enumerate(weights):
            self.set(f"w{i}", weight)
        super().__init__(frozen=self.frozen, a={"a": torch.ones(3)})

    def set(self, name: str, weight: torch.Tensor) -> None:
        self.frozen.register_parameter(name, torch.nn.Parameter(weight, requires_grad=False))

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return self.frozen._parameters  # type: ignore[return-value]


class Alike(Frozen):
    """The same state, held equally by two ranks."""

    def walk(self, used_up):  # type: ignore[no-untyped-def]
        walk = super().walk(used_up)
        for live in walk.leaves:
            live.replicas = (0, 1)
        return walk


class Run:
    """A capture of such a state."""

    def __init__(
        self, state: State, ring: SlotRing, sealer: _native.Sealer, *, has_slots: bool = True, **how: object
    ) -> None:
        self.state: Any = state
        self.ring, self.sealer = ring, sealer
        slots = ring if has_slots else None
        self.capture = Capture(state, slots, sealer, Options(), schedule=Pace(1), **how)  # type: ignore[arg-type]

    def captured(self, step: int) -> Content:
        """Capture a boundary, and check that the snapshot is complete and equals the state."""
        outcome = self.capture.boundary(step, lambda: b"{}")
        assert outcome.captured, outcome
        assert self.sealer.drain(240)
        content = newest(self.ring)
        assert (content.step, content.torn) == (step, [])
        frozen = {f"frozen.{name}": bytes_of(weight) for name, weight in self.state.weights.items()}
        assert content.leaves == {"a.a": bytes_of(torch.ones(3)), **frozen}
        return content


Start = Callable[..., Run]


@pytest.fixture
def start(ring: SlotRing, sealer: _native.Sealer) -> Iterator[Start]:
    """Captures of a state, which are closed in the end."""
    started: list[Run] = []

    def begin(state: State, **how: Any) -> Run:
        started.append(Run(state, ring, sealer, **how))
        return started[-1]

    yield begin
    for run in started:
        run.capture.close()


def frozen(count: int = 2) -> Frozen:
    return Frozen(*(torch.randn(LARGE) for _ in range(count)))


def digest_of(tensor: torch.Tensor) -> int:
    return _native.digest(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def write(state: Frozen, how: str) -> None:
    weight = state.weights["w0"]
    match how:
        case "mul_":
            weight.mul_(2)
        case "data":
            weight.data = weight.data + 1
        case "numpy":
            weight.numpy().reshape(-1)[3] += 5.0
        case "other":
            state.set("w0", torch.randn_like(weight))
        case "reshaped":
            state.set("w0", weight.view(2, -1).clone())


# ---- in host memory


@pytest.mark.parametrize(
    ("how", "has_region"), [("mul_", False), ("data", True), ("numpy", True), ("other", True)]
)
def test_a_constant_changed_before_the_region_is_filled_is_an_ordinary_leaf(
    start: Start, how: str, has_region: bool
) -> None:
    """For example an average that follows the weights."""
    run = start(frozen())
    run.capture.digest_candidates()
    if has_region:
        give_region(run.capture)
    write(run.state, how)
    if not has_region:
        give_region(run.capture)
    content = run.captured(1)
    assert content.constants == ["frozen.w1"]
    assert run.captured(2).constants_nonce == content.constants_nonce


def test_a_constant_written_during_the_fill_is_left_out_of_the_next_try(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(frozen())
    run.capture.digest_candidates()
    region = give_region(run.capture)
    copy, writes = _native.copy_digest, [1, 2]

    def written_meanwhile(*arrays: object) -> None:
        copy(*arrays)  # type: ignore[arg-type]
        if writes:
            run.state.weights["w0"].add_(writes.pop())

    monkeypatch.setattr(_native, "copy_digest", written_meanwhile)
    assert not run.capture.boundary(1, lambda: b"{}").captured
    content = run.captured(2)
    assert writes == []
    assert (content.constants_nonce, content.constants) == (region.header.nonce, ["frozen.w1"])


@pytest.mark.parametrize("how", ["mul_", "reshaped"])
def test_no_region_is_filled_if_all_constants_changed(start: Start, how: str) -> None:
    run = start(frozen(1))
    give_region(run.capture)
    write(run.state, how)
    content = run.captured(1)
    assert (content.constants_nonce, content.constants, run.capture.region_named) == (0, [], None)


def test_a_constant_removed_before_the_slots_exist_leaves_no_region(start: Start, ring: SlotRing) -> None:
    """There was memory for the region and none for the slots."""
    run = start(frozen(), has_slots=False)
    capture = run.capture
    assert capture.memory_wanted(ordered=True) is not None
    size = capture.region_wanted()
    assert size is not None
    del run.state.weights["w0"]
    needed = capture.memory_wanted(ordered=True)
    assert needed.image_bytes > LARGE
    region = make_region(size)
    capture.fill_region(Slot.open(os.dup(region.descriptor), map_image=True), 1)
    capture.set_slots(ring)
    assert run.captured(1).constants == []
    assert capture.region_named is None


@pytest.mark.parametrize(
    ("how", "at"), [("mul_", 2), ("data", 5), ("numpy", 2), ("numpy", 5), ("other", 5), ("reshaped", 2)]
)
def test_the_same_snapshot_has_the_change_and_the_region_keeps_the_rest(
    start: Start, how: str, at: int
) -> None:
    run = start(frozen())
    region = give_region(run.capture)
    for step in range(1, 7):
        if step == at:
            write(run.state, how)
        content = run.captured(step)
        assert content.constants_nonce == region.header.nonce
        assert content.constants == (["frozen.w1"] if step >= at else ["frozen.w0", "frozen.w1"])
        assert ("frozen.w0" in {leaf.name for leaf in content.layout.shard.leaves}) == (step >= at)
    write(run.state, how)  # and once more, as an ordinary leaf
    run.captured(9)
    run.state.weights["w1"].mul_(2)
    content = run.captured(10)
    assert (content.constants_nonce, content.constants, run.capture.region_named) == (0, [], None)
    assert run.capture.report()["snapshots_lost"] == 0


def test_parameters_that_come_later_are_ordinary_leaves_and_those_that_go_are_in_no_later_snapshot(
    start: Start,
) -> None:
    run = start(frozen())
    give_region(run.capture)
    run.captured(1)
    run.state.set("late", torch.randn(LARGE))
    for step in range(2, 6):
        assert run.captured(step).constants == ["frozen.w0", "frozen.w1"]
    assert run.capture.region_wanted() is None
    del run.state.weights["w0"]
    for step in range(6, 9):
        assert run.captured(step).constants_nonce == 0


def test_leaves_that_are_never_constants(start: Start) -> None:
    """Small leaves, leaves of an optimizer or with a gradient, leaves that are not row-major, and buffers."""
    model = torch.nn.Module()
    kinds = {"small": (3, False), "owned": (LARGE, False), "trained": (LARGE, True)}
    for name, (count, trains) in kinds.items():
        model.register_parameter(name, torch.nn.Parameter(torch.randn(count), requires_grad=trains))
    model.odd = torch.nn.Parameter(torch.randn(800, 500).t(), requires_grad=False)
    model.register_buffer("quantized", torch.zeros(LARGE))
    optimizer = torch.optim.SGD([model.owned], lr=0.1)
    capture = start(State(model=model), optimizers=[optimizer]).capture
    capture.digest_candidates()
    assert capture.memory_needed(ordered=True) is not None
    assert capture.region_wanted() is None


@pytest.mark.dist
@pytest.mark.filterwarnings("ignore")
def test_a_trained_dtensor_is_not_constant(sealer: _native.Sealer) -> None:
    """Its local tensor requires no gradient and is in no optimizer; the DTensor decides."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh, model = init_device_mesh("cpu", (1,)), torch.nn.Module()
        for name, trains in {"trained": True, "owned": False, "frozen": False}.items():
            part = distribute_tensor(torch.randn(LARGE), mesh, [Shard(0)])
            model.register_parameter(name, torch.nn.Parameter(part, requires_grad=trains))
        optimizer = torch.optim.SGD([model.owned], lr=0.1)
        tree = Tree({"model": model, "optimizer": optimizer})
        capture = Capture(
            tree, None, sealer, Options(), optimizers=tree.optimizers, schedule=Pace(None, None)
        )
        capture.digest_candidates()
        assert capture.memory_needed(ordered=True) is not None
        assert capture._constants.names == {"model.frozen": True}
        capture.close()
    finally:
        dist.destroy_process_group()


def test_a_region_that_cannot_be_written_or_is_too_small_leaves_its_constants_to_the_slots(
    start: Start,
) -> None:
    run = start(frozen(1))
    assert give_region(run.capture).begin(2) is not None  # another writer holds it
    content = run.captured(1)
    assert (content.constants_nonce, content.constants) == (0, [])
    run.capture.close()
    run = start(frozen(1))
    assert run.capture.memory_needed(ordered=True) is not None
    size = run.capture.region_wanted()
    small = make_region(size._replace(image_bytes=4096))
    run.capture.fill_region(Slot.open(os.dup(small.descriptor), map_image=True), 1)
    assert run.captured(2).constants_nonce == 0


@pytest.mark.parametrize("changes", [False, True])
def test_ranks_with_and_without_a_region_assign_replicas_equally(
    start: Start, ring: SlotRing, *, changes: bool
) -> None:
    """One rank has no memory for a region. They may only differ on constants that have changed since."""
    tables = []
    for rank in range(2):
        torch.manual_seed(2)
        state = Alike(*(torch.randn(LARGE + 1000 * i) for i in range(4)))
        state.more |= {f"b{i}": torch.randn(LARGE + 700 * i) for i in range(4)}
        sharing = Sharing(rank, is_divided=True, least_bytes=1)
        run = start(state, sharing=sharing)
        region = give_region(run.capture)
        if rank:
            assert region.begin(2) is not None  # another writer holds it
        for step in range(1, 3):
            if changes and step == 2:
                state.weights["w2"].mul_(2)
            assert run.capture.boundary(step, lambda: b"{}").captured
            assert run.sealer.drain(240)
        found = ring.newest_sealed()
        metadata = found[0].metadata(found[1])
        assert bool(metadata.image.constants.leaves) != bool(rank)
        [table] = metadata.replicas()
        tables.append({leaf.name: (leaf.content, digest, by) for leaf, digest, by in table.rows()})
        run.capture.close()
    one, other = tables
    assert {by for _, _, by in one.values()} == {0, 1, None}
    assert one.keys() == other.keys()
    unlike = {name for name in one if one[name] != other[name]}
    assert unlike == ({"frozen.w2"} if changes else set())


# ---- after a resume


def resumed(start: Start, state: Frozen) -> tuple[ConstantsRegion, dict[str, int]]:
    """Return the region and the digests of a snapshot that another attempt took of a state."""
    run = start(state)
    give_region(run.capture)
    run.captured(1)
    region = run.capture._constants.region
    assert region is not None
    run.capture.close()
    return region, {f"frozen.{name}": digest_of(weight) for name, weight in state.weights.items()}


@pytest.mark.parametrize("changes", [False, True])
def test_the_region_of_the_resumed_snapshot_is_used_at_once(start: Start, changes: bool) -> None:
    """A constant that changed since then is an ordinary leaf."""
    state = frozen()
    region, known = resumed(start, state)
    if changes:
        state.weights["w1"].mul_(3)
    run = start(state, known=known, constants=known, region=region)
    needed = run.capture.memory_needed(ordered=True)
    assert (needed.image_bytes < 2 * 4096) != changes
    assert run.capture.region_wanted() is None
    content = run.captured(20)
    expected = ["frozen.w0"] if changes else ["frozen.w0", "frozen.w1"]
    assert (content.constants_nonce, content.constants) == (region.nonce, expected)


def test_constants_are_determined_again_if_all_differ(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    state = frozen()
    region, known = resumed(start, state)
    for weight in state.weights.values():
        weight.mul_(3)
    run = start(state, known=known, constants=known, region=region)
    other = give_region(run.capture)
    assert run.capture.memory_needed(ordered=True) is not None
    assert sum("weights were loaded after attach" in each for each in caplog.messages) == 1
    content = run.captured(20)
    assert content.constants_nonce == other.header.nonce != region.nonce
    assert content.constants == ["frozen.w0", "frozen.w1"]


def test_a_leaf_frozen_during_the_last_attempt_is_constant_after_a_resume(start: Start) -> None:
    """An average that still changes is not."""
    state = frozen(3)
    known = {f"frozen.{name}": digest_of(weight) for name, weight in state.weights.items()}
    run = start(state, known=known, constants={"frozen.w0"})
    state.weights["w2"].mul_(2)
    give_region(run.capture)
    assert run.captured(20).constants == ["frozen.w0", "frozen.w1"]


# ---- on a device


@pytest.fixture
def loop(ring: SlotRing, sealer: _native.Sealer) -> Iterator[Accelerated]:
    """Two frozen parameters on a device, which belong in a region."""
    loop = Accelerated(ring, sealer)
    for name in ("frozen", "still"):
        frozen = torch.nn.Parameter(torch.randn(LARGE), requires_grad=False)
        loop.model.register_parameter(name, frozen)
        loop.device.adopt(frozen)
    loop.capture.digest_candidates()
    give_region(loop.capture)
    yield loop
    loop.close()


def iterate_begins(loop: Accelerated) -> bool:
    for parameter in (loop.model.a, loop.model.b):
        parameter.grad = torch.randn_like(parameter)
        loop.device.adopt(parameter.grad)
    loop.optimizer.step()
    return loop.boundary().captured


def iterate(loop: Accelerated) -> str:
    iterate_begins(loop)
    return loop.result()


def test_on_a_device_no_snapshot_is_begun_before_the_region_is_sealed(loop: Accelerated) -> None:
    loop.device.side.hold()
    for _ in range(3):
        assert not iterate_begins(loop)
    assert loop.ring.newest_sealed() is None
    loop.finish()
    for _ in range(3):
        assert iterate(loop) == "exact"
        assert newest(loop.ring).constants == ["model.frozen", "model.still"]
    assert loop.ways()["model.frozen"] == loop.ways()["model.still"] == "constant"
    assert loop.ways()["model.a"] != "constant"


def test_on_a_device_writes_wait_for_the_fill_of_the_region(loop: Accelerated) -> None:
    loop.device.side.hold()
    assert not iterate_begins(loop)
    loop.kernel(lambda: loop.model.frozen.data.mul_(2))
    loop.finish()
    for _ in range(4):
        if iterate(loop) == "exact":
            assert newest(loop.ring).constants == ["model.still"]
    assert iterate(loop) == "exact"
    assert loop.ways()["model.frozen"] != "constant"


def test_on_a_device_constants_are_not_copied_again(loop: Accelerated) -> None:
    for _ in range(6):
        iterate(loop)
    loop.device.side.hold()
    assert iterate_begins(loop)
    pieces = loop.device.side.pending()
    loop.finish()
    loop.capture._constants.changed("model.frozen")
    loop.capture._planner.drop()
    loop.device.side.hold()
    assert iterate_begins(loop)
    # An ordinary leaf is copied: 1.2 MB in pieces of 128 KiB.
    assert loop.device.side.pending() - pieces >= 4 * LARGE // (128 << 10)
    assert loop.result() == "exact"


def test_on_a_device_a_snapshot_without_the_change_is_never_sealed(loop: Accelerated) -> None:
    """A reader of the seal may release older snapshots before the training thread polls again. No leaf was
    written during its copy, so none needs synchronisation afterwards."""
    for _ in range(6):
        iterate(loop)
    nonce = newest(loop.ring).constants_nonce
    loop.kernel(lambda: loop.model.frozen.data.mul_(2))
    iterate_begins(loop)
    loop.device.side.drain()
    loop.device.compute.drain()
    assert loop.sealer.drain(240)
    found = loop.ring.newest_sealed()
    assert found[1].step < loop.step
    loop.finish()
    assert loop.capture.report()["snapshots_lost"] == 1
    for _ in range(3):
        assert iterate(loop) == "exact"
        content = newest(loop.ring)
        assert (content.constants_nonce, content.constants) == (nonce, ["model.still"])
    ways = loop.ways()
    assert ways["model.still"] == "constant"
    assert ways["model.frozen"] not in ("constant", "wait")
    assert "model.frozen" not in loop.capture._policy.torn


def test_a_capture_that_is_closed_while_a_region_is_filled_waits_for_its_copies(
    ring: SlotRing, sealer: _native.Sealer
) -> None:
    loop = Accelerated(ring, sealer)
    frozen = torch.nn.Parameter(torch.randn(LARGE), requires_grad=False)
    loop.model.register_parameter("frozen", frozen)
    loop.device.adopt(frozen)
    region = give_region(loop.capture)
    assert not iterate_begins(loop)
    loop.device.compute.release()
    loop.capture.close()
    assert region.state().state is SlotState.SEALED
    loop.device.shutdown()
