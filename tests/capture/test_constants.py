"""Constants: stored once, in a region; digested at every capture; ordinary after one difference."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest
import safetensors.torch
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
from .content import Content, Live, State, bytes_of, give_region, make_region, newest


class Frozen(State):
    """A state with parameters that have no gradient and are in no optimizer, and one small tensor."""

    def __init__(self, *weights: torch.Tensor) -> None:
        super().__init__(a={"a": torch.ones(3)})
        self.weights = {f"w{i}": weight for i, weight in enumerate(weights)}

    def walk(self, used_up):  # type: ignore[no-untyped-def]
        walk = super().walk(used_up)
        walk.guards.append((self.weights, len(self.weights)))
        for name, weight in self.weights.items():
            walk.leaves.append(Live(f"frozen.{name}", weight, "parameter", None, self.weights, name))
        return walk


class Alike(Frozen):
    """The same state, held equally by two ranks."""

    def walk(self, used_up):  # type: ignore[no-untyped-def]
        walk = super().walk(used_up)
        for live in walk.leaves:
            live.replicas = (0, 1)
        return walk


def made(state: State, ring: SlotRing, sealer: _native.Sealer, **how: object) -> Capture:
    return Capture(state, ring, sealer, Options(), schedule=Pace(1), **how)  # type: ignore[arg-type]


def captured(capture: Capture, ring: SlotRing, sealer: _native.Sealer, step: int) -> Content:
    """Capture a boundary, and check that the snapshot is complete and equals the state."""
    outcome = capture.boundary(step, lambda: b"{}")
    assert outcome.captured, outcome
    assert sealer.drain(240)
    content = newest(ring)
    assert (content.step, content.torn) == (step, [])
    state = capture._planner._tree
    assert isinstance(state, Frozen)
    frozen = {f"frozen.{name}": bytes_of(weight) for name, weight in state.weights.items()}
    assert content.leaves == {"a.a": bytes_of(torch.ones(3)), **frozen}
    return content


def digest_of(tensor: torch.Tensor) -> int:
    return _native.digest(tensor.data_ptr(), tensor.numel() * tensor.element_size())


# ---- in host memory


def test_the_first_snapshot_names_the_region_and_its_slot_holds_the_rest(
    ring: SlotRing, sealer: _native.Sealer
) -> None:
    state = Frozen(torch.randn(LARGE), torch.randn(LARGE))
    capture = made(state, ring, sealer)
    capture.digest_candidates()
    needed = capture.memory_needed(ordered=True)
    assert needed is not None
    assert needed.image_bytes < 2 * 4096
    region = give_region(capture)
    for step in range(1, 5):
        content = captured(capture, ring, sealer, step)
        assert content.constants == ["frozen.w0", "frozen.w1"]
        assert content.constants_nonce == region.header.nonce == capture.region_named
        assert content.layout.shard.num_bytes < 2 * 4096
        assert {row[0] for row in capture.describe()} == {"host", "constant"}
    # The safetensors library can open the region as it is.
    sealed = region.sealed()
    assert sealed is not None
    opened = safetensors.torch.load(bytes(region.image_view[: sealed.record.image_bytes]))
    assert torch.equal(opened["frozen.w0"], state.weights["w0"])
    assert set(safetensors.torch.load(content.image)) == {"a.a"}
    capture.close()


def test_a_leaf_changed_before_the_first_boundary_is_not_constant(
    ring: SlotRing, sealer: _native.Sealer
) -> None:
    """An average that follows the weights."""
    state = Frozen(torch.randn(LARGE), torch.randn(LARGE))
    capture = made(state, ring, sealer)
    capture.digest_candidates()
    state.weights["w0"].mul_(2)
    give_region(capture)
    assert captured(capture, ring, sealer, 1).constants == ["frozen.w1"]
    capture.close()


def test_without_digests_before_the_loop_a_leaf_is_constant_until_it_changes(
    ring: SlotRing, sealer: _native.Sealer
) -> None:
    state = Frozen(torch.randn(LARGE))
    capture = made(state, ring, sealer)
    give_region(capture)
    assert captured(capture, ring, sealer, 1).constants == ["frozen.w0"]
    capture.close()


@pytest.mark.parametrize("write", ["mul_", "data", "numpy", "other"])
def test_a_constant_changed_before_the_region_is_filled_is_an_ordinary_leaf(
    ring: SlotRing, sealer: _native.Sealer, write: str
) -> None:
    state = Frozen(torch.randn(LARGE), torch.randn(LARGE))
    capture = made(state, ring, sealer)
    capture.digest_candidates()
    give_region(capture)
    _write(state, write)
    content = captured(capture, ring, sealer, 1)
    assert content.constants == ["frozen.w1"]
    assert captured(capture, ring, sealer, 2).constants_nonce == content.constants_nonce
    capture.close()


def test_a_constant_written_during_the_fill_is_left_out_of_the_next_try(
    ring: SlotRing, sealer: _native.Sealer, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = Frozen(torch.randn(LARGE), torch.randn(LARGE))
    capture = made(state, ring, sealer)
    capture.digest_candidates()
    region = give_region(capture)
    copy, writes = _native.copy_digest, [1, 2]

    def written_meanwhile(*arrays: object) -> None:
        copy(*arrays)  # type: ignore[arg-type]
        if writes:
            state.weights["w0"].add_(writes.pop())

    monkeypatch.setattr(_native, "copy_digest", written_meanwhile)
    assert not capture.boundary(1, lambda: b"{}").captured
    content = captured(capture, ring, sealer, 2)
    assert writes == []
    assert (content.constants_nonce, content.constants) == (region.header.nonce, ["frozen.w1"])
    capture.close()


def test_no_region_is_filled_if_all_constants_changed(ring: SlotRing, sealer: _native.Sealer) -> None:
    for write in ("mul_", "reshaped"):
        state = Frozen(torch.randn(LARGE))
        capture = made(state, ring, sealer)
        give_region(capture)
        _write(state, write)
        content = captured(capture, ring, sealer, 1)
        assert (content.constants_nonce, content.constants, capture.region_named) == (0, [], None)
        capture.close()


def test_a_constant_removed_before_the_slots_exist_leaves_no_region(
    ring: SlotRing, sealer: _native.Sealer
) -> None:
    """There was memory for the region and none for the slots."""
    state = Frozen(torch.randn(LARGE), torch.randn(LARGE))
    capture = Capture(state, None, sealer, Options(), schedule=Pace(1))
    assert capture.memory_wanted(ordered=True) is not None
    size = capture.region_wanted()
    assert size is not None
    del state.weights["w0"]
    needed = capture.memory_wanted(ordered=True)
    assert needed is not None
    assert needed.image_bytes > LARGE
    region = make_region(size)
    capture.fill_region(Slot.open(os.dup(region.descriptor), map_image=True), 1)
    capture.set_slots(ring)
    assert captured(capture, ring, sealer, 1).constants == []
    assert capture.region_named is None
    capture.close()


@pytest.mark.parametrize("write", ["mul_", "data", "numpy", "other", "reshaped"])
@pytest.mark.parametrize("at", [2, 5])
def test_the_same_snapshot_has_the_change_and_the_region_keeps_the_rest(
    ring: SlotRing, sealer: _native.Sealer, write: str, at: int
) -> None:
    state = Frozen(torch.randn(LARGE), torch.randn(LARGE))
    capture = made(state, ring, sealer)
    region = give_region(capture)
    for step in range(1, 9):
        if step == at:
            _write(state, write)
        content = captured(capture, ring, sealer, step)
        assert content.constants_nonce == region.header.nonce
        assert content.constants == (["frozen.w1"] if step >= at else ["frozen.w0", "frozen.w1"])
        assert ("frozen.w0" in {leaf.name for leaf in content.layout.shard.leaves}) == (step >= at)
    _write(state, write)  # and once more, as an ordinary leaf
    captured(capture, ring, sealer, 9)
    state.weights["w1"].mul_(2)
    content = captured(capture, ring, sealer, 10)
    assert (content.constants_nonce, content.constants, capture.region_named) == (0, [], None)
    assert capture.report()["snapshots_lost"] == 0
    capture.close()


def _write(state: Frozen, how: str) -> None:
    weight = state.weights["w0"]
    match how:
        case "mul_":
            weight.mul_(2)
        case "data":
            weight.data = weight.data + 1
        case "numpy":
            weight.numpy().reshape(-1)[3] += 5.0
        case "other":
            state.weights["w0"] = torch.randn_like(weight)
        case "reshaped":
            state.weights["w0"] = weight.view(2, -1).clone()


def test_a_constant_removed_from_the_state_is_in_no_later_snapshot(
    ring: SlotRing, sealer: _native.Sealer
) -> None:
    state = Frozen(torch.randn(LARGE), torch.randn(LARGE))
    capture = made(state, ring, sealer)
    give_region(capture)
    captured(capture, ring, sealer, 1)
    del state.weights["w0"]
    for step in range(2, 5):
        assert captured(capture, ring, sealer, step).constants_nonce == 0
    capture.close()


def test_a_parameter_added_later_is_an_ordinary_leaf(ring: SlotRing, sealer: _native.Sealer) -> None:
    state = Frozen(torch.randn(LARGE))
    capture = made(state, ring, sealer)
    give_region(capture)
    captured(capture, ring, sealer, 1)
    state.weights["late"] = torch.randn(LARGE)
    for step in range(2, 8):
        assert captured(capture, ring, sealer, step).constants == ["frozen.w0"]
    assert capture.region_wanted() is None
    capture.close()


def test_a_state_of_constants_alone(ring: SlotRing, sealer: _native.Sealer) -> None:
    state = Frozen(torch.randn(LARGE))
    state.named.clear()
    capture = made(state, ring, sealer)
    give_region(capture)
    for step in range(1, 5):
        assert capture.boundary(step, lambda: b"{}").captured
        assert sealer.drain(240)
        content = newest(ring)
        assert (content.step, content.torn) == (step, [])
        assert content.leaves == {"frozen.w0": bytes_of(state.weights["w0"])}
    capture.close()


def test_leaves_that_are_never_constants(
    ring: SlotRing, sealer: _native.Sealer, caplog: pytest.LogCaptureFixture
) -> None:
    """Small leaves, leaves of an optimizer or with a gradient, leaves that are not row-major, and buffers.
    Their bytes in each slot are logged once."""
    model = torch.nn.Module()
    kinds = {"small": (3, False), "owned": (LARGE, False), "trained": (LARGE, True)}
    for name, (count, trains) in kinds.items():
        model.register_parameter(name, torch.nn.Parameter(torch.randn(count), requires_grad=trains))
    model.odd = torch.nn.Parameter(torch.randn(800, 500).t(), requires_grad=False)
    model.register_buffer("quantized", torch.zeros(LARGE))
    optimizer = torch.optim.SGD([model.owned], lr=0.1)
    capture = made(State(model=model), ring, sealer, optimizers=[optimizer])
    capture.digest_candidates()
    with caplog.at_level(logging.INFO, logger="flashckpt"):
        assert capture.memory_needed(ordered=True) is not None
        assert capture.memory_needed(ordered=True) is not None
    assert capture.region_wanted() is None
    logged = "\n".join(caplog.messages)
    assert logged.count("1,200,000 bytes of frozen parameters in an optimizer") == 1
    assert logged.count("1,600,000 bytes of frozen parameters that are not row-major") == 1
    assert logged.count("1,200,000 bytes of buffers") == 1
    capture.close()


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


def test_a_region_that_cannot_be_written_leaves_its_constants_to_the_slots(
    ring: SlotRing, sealer: _native.Sealer
) -> None:
    state = Frozen(torch.randn(LARGE))
    capture = made(state, ring, sealer)
    region = give_region(capture)
    assert region.begin(2) is not None  # somebody else has it
    content = captured(capture, ring, sealer, 1)
    assert (content.constants_nonce, content.constants) == (0, [])
    capture.close()


@pytest.mark.parametrize("changes", [False, True])
def test_ranks_with_and_without_a_region_assign_replicas_equally(
    ring: SlotRing, sealer: _native.Sealer, *, changes: bool
) -> None:
    """One rank has no memory for a region. They may only differ on constants that have changed since."""
    tables = []
    for rank in range(2):
        torch.manual_seed(2)
        state = Alike(*(torch.randn(LARGE + 1000 * i) for i in range(4)))
        state.named["b"] = {f"b{i}": torch.randn(LARGE + 700 * i) for i in range(4)}
        sharing = Sharing(rank, is_divided=True, least_bytes=1)
        capture = made(state, ring, sealer, sharing=sharing)
        region = give_region(capture)
        if rank:
            assert region.begin(2) is not None  # somebody else has it
        for step in range(1, 3):
            if changes and step == 2:
                state.weights["w2"].mul_(2)
            assert capture.boundary(step, lambda: b"{}").captured
            assert sealer.drain(240)
        found = ring.newest_sealed()
        assert found is not None
        metadata = found[0].metadata(found[1])
        assert (metadata.constants is None) == bool(rank)
        [table] = metadata.replicas()
        tables.append({leaf.name: (leaf.content, digest, by) for leaf, digest, by in table.rows()})
        capture.close()
    one, other = tables
    assert {by for _, _, by in one.values()} == {0, 1, None}
    assert one.keys() == other.keys()
    unlike = {name for name in one if one[name] != other[name]}
    assert unlike == ({"frozen.w2"} if changes else set())


# ---- after a resume


def resumed(state: Frozen, ring: SlotRing, sealer: _native.Sealer) -> tuple[ConstantsRegion, dict[str, int]]:
    """Return the region and the digests of a snapshot that another attempt took of a state."""
    capture = made(state, ring, sealer)
    give_region(capture)
    captured(capture, ring, sealer, 1)
    region = capture._constants.region
    assert region is not None
    capture.close()
    return region, {f"frozen.{name}": digest_of(weight) for name, weight in state.weights.items()}


def test_the_region_of_the_resumed_snapshot_is_used_at_once(ring: SlotRing, sealer: _native.Sealer) -> None:
    state = Frozen(torch.randn(LARGE), torch.randn(LARGE))
    region, known = resumed(state, ring, sealer)
    again = made(state, ring, sealer, known=known, constants=known, region=region)
    needed = again.memory_needed(ordered=True)
    assert needed is not None
    assert needed.image_bytes < 2 * 4096
    assert again.region_wanted() is None
    assert captured(again, ring, sealer, 20).constants_nonce == region.nonce
    again.close()


def test_a_constant_changed_since_the_resumed_snapshot_is_ordinary(
    ring: SlotRing, sealer: _native.Sealer
) -> None:
    state = Frozen(torch.randn(LARGE), torch.randn(LARGE))
    region, known = resumed(state, ring, sealer)
    state.weights["w1"].mul_(3)
    again = made(state, ring, sealer, known=known, constants=known, region=region)
    assert again.memory_needed(ordered=True) is not None
    assert again.region_wanted() is None
    content = captured(again, ring, sealer, 20)
    assert (content.constants_nonce, content.constants) == (region.nonce, ["frozen.w0"])
    again.close()


def test_constants_are_determined_again_if_all_differ(
    ring: SlotRing, sealer: _native.Sealer, caplog: pytest.LogCaptureFixture
) -> None:
    state = Frozen(torch.randn(LARGE), torch.randn(LARGE))
    region, known = resumed(state, ring, sealer)
    for weight in state.weights.values():
        weight.mul_(3)
    again = made(state, ring, sealer, known=known, constants=known, region=region)
    other = give_region(again)
    assert again.memory_needed(ordered=True) is not None
    assert sum("weights were loaded after attach" in each for each in caplog.messages) == 1
    content = captured(again, ring, sealer, 20)
    assert content.constants_nonce == other.header.nonce != region.nonce
    assert content.constants == ["frozen.w0", "frozen.w1"]
    again.close()


def test_a_leaf_frozen_during_the_last_attempt_is_constant_after_a_resume(
    ring: SlotRing, sealer: _native.Sealer
) -> None:
    """An average that still changes is not."""
    state = Frozen(torch.randn(LARGE), torch.randn(LARGE), torch.randn(LARGE))
    known = {f"frozen.{name}": digest_of(weight) for name, weight in state.weights.items()}
    again = made(state, ring, sealer, known=known, constants={"frozen.w0"})
    state.weights["w2"].mul_(2)
    give_region(again)
    assert captured(again, ring, sealer, 20).constants == ["frozen.w0", "frozen.w1"]
    again.close()


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
    for _ in range(8):
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


def test_on_a_device_a_change_loses_one_snapshot_and_never_a_byte(loop: Accelerated) -> None:
    for _ in range(6):
        iterate(loop)
    nonce = newest(loop.ring).constants_nonce
    loop.kernel(lambda: loop.model.frozen.data.mul_(2))
    iterate_begins(loop)
    loop.finish()
    found = loop.ring.newest_sealed()
    assert found is None or found[1].step != loop.step
    for _ in range(4):
        assert iterate(loop) == "exact"
        content = newest(loop.ring)
        assert (content.constants_nonce, content.constants) == (nonce, ["model.still"])
    assert loop.ways()["model.frozen"] != "constant"


def test_on_a_device_a_snapshot_without_the_change_is_never_sealed(loop: Accelerated) -> None:
    """A reader of the seal may release older snapshots before the training thread polls again. No leaf was
    written during its copy, so none needs synchronisation afterwards."""
    for _ in range(6):
        iterate(loop)
    loop.kernel(lambda: loop.model.frozen.data.mul_(2))
    iterate_begins(loop)
    loop.device.side.release()
    loop.device.compute.release()
    loop.device.side.drain()
    loop.device.compute.drain()
    assert loop.sealer.drain(240)
    found = loop.ring.newest_sealed()
    assert found is not None
    assert found[1].step < loop.step
    loop.finish()
    assert loop.capture.report()["snapshots_lost"] == 1
    for _ in range(3):
        assert iterate(loop) == "exact"
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


def test_a_region_too_small_is_refused(ring: SlotRing, sealer: _native.Sealer) -> None:
    state = Frozen(torch.randn(LARGE))
    capture = made(state, ring, sealer)
    assert capture.memory_needed(ordered=True) is not None
    size = capture.region_wanted()
    assert size is not None
    small = make_region(size._replace(image_bytes=4096))
    capture.fill_region(Slot.open(os.dup(small.descriptor), map_image=True), 1)
    assert captured(capture, ring, sealer, 1).constants_nonce == 0
    capture.close()
