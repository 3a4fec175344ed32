"""Constants that slots leave to a region they share: digested at every boundary, never copied again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from flashckpt import _native
from flashckpt.capture import Capture
from flashckpt.capture.pace import Pace
from flashckpt.memory.slot import SlotRing
from flashckpt.options import Options

from .accelerated import LARGE, Accelerated
from .content import Content, bytes_of, newest, region_of, region_with
from .test_constants import Frozen, captured, constant, digest_of, iterate, iterate_begins


@pytest.fixture
def loop(ring: SlotRing, sealer: _native.Sealer) -> Iterator[Accelerated]:
    """A frozen parameter on a device, a constant already, in a region that the slots share."""
    loop = Accelerated(ring, sealer)
    frozen = torch.nn.Parameter(torch.randn(LARGE), requires_grad=False)
    loop.model.register_parameter("frozen", frozen)
    loop.device.adopt(frozen)
    constant(loop)
    share(loop.capture, newest(ring))
    yield loop
    loop.close()


def share(capture: Capture, content: Content) -> int:
    assert capture.sharing_wanted() == content.layout.constants
    shared = region_of(content)
    capture.share(shared)
    assert capture.sharing_wanted() is None
    return shared.nonce


def frozen_capture(ring: SlotRing, sealer: _native.Sealer, *, steps: int = 6) -> tuple[Frozen, Capture]:
    """A capture of host memory whose constant is shared after so many steps."""
    state = Frozen(torch.randn(LARGE))
    state.named["a"] = {"a": torch.ones(3)}
    capture = Capture(state, ring, sealer, Options(), schedule=Pace(1))
    for step in range(1, steps + 1):
        content = captured(capture, ring, sealer, step)
    share(capture, content)
    return state, capture


def test_a_snapshot_names_the_region_and_holds_the_rest(ring: SlotRing, sealer: _native.Sealer) -> None:
    state, capture = frozen_capture(ring, sealer)
    for step in range(7, 12):
        content = captured(capture, ring, sealer, step)
        assert content.leaves == {"frozen.w": bytes_of(state.weight), "a.a": bytes_of(torch.ones(3))}
        assert content.constants_nonce != 0
        assert content.layout.num_bytes == content.layout.shard.num_bytes < 4 * LARGE
    assert capture.may_name_shared
    capture.close()


def test_on_a_device_no_byte_of_it_is_copied(loop: Accelerated) -> None:
    assert iterate(loop) == "exact"
    assert newest(loop.ring).constants_nonce != 0
    loop.device.side.hold()
    iterate_begins(loop)
    pieces = loop.device.side.pending()
    loop.capture._targets.shared = None
    loop.capture._following.drop()
    for target in loop.capture._targets.by_name.values():
        target.kept.clear()
    loop.finish()
    loop.device.side.hold()
    iterate_begins(loop)
    # The slot holds it itself again, and gets its copy: 1.2 MB in pieces of 128 KiB.
    assert loop.device.side.pending() - pieces == -(-4 * LARGE // (128 << 10))
    assert loop.result() == "exact"


def test_on_a_device_a_change_loses_one_snapshot_and_never_a_byte(loop: Accelerated) -> None:
    assert iterate(loop) == "exact"
    loop.kernel(lambda: loop.model.frozen.data.mul_(2))
    assert iterate(loop) == "none"
    for _ in range(4):
        assert iterate(loop) == "exact"
        assert newest(loop.ring).constants_nonce == 0
    assert loop.ways()["model.frozen"] != "constant"
    assert not loop.capture.may_name_shared


def test_on_the_host_the_very_snapshot_has_the_change(ring: SlotRing, sealer: _native.Sealer) -> None:
    state, capture = frozen_capture(ring, sealer)
    captured(capture, ring, sealer, 7)
    state.weight.numpy()[3] = 5.0
    for step in range(8, 12):
        content = captured(capture, ring, sealer, step)
        assert content.leaves["frozen.w"] == bytes_of(state.weight)
        assert (content.constants_nonce, content.layout.constants) == (0, None)
    assert not capture.may_name_shared
    assert capture.report()["snapshots_lost"] == 0
    capture.close()


def test_a_region_of_other_digests_is_not_named(ring: SlotRing, sealer: _native.Sealer) -> None:
    """It was filled from a snapshot before a change of which the capture knows already."""
    state = Frozen(torch.randn(LARGE))
    capture = Capture(state, ring, sealer, Options(), schedule=Pace(1))
    for step in range(1, 7):
        content = captured(capture, ring, sealer, step)
    stale = region_of(content)
    state.weight.numpy()[3] = 5.0
    captured(capture, ring, sealer, 7)
    capture.share(stale)
    for step in range(8, 12):
        content = captured(capture, ring, sealer, step)
        assert content.leaves["frozen.w"] == bytes_of(state.weight)
        assert content.constants_nonce == 0
    assert not capture.may_name_shared
    capture.close()


def test_a_region_of_before_a_resume_with_other_digests_is_not_named(
    ring: SlotRing, sealer: _native.Sealer
) -> None:
    state, capture = frozen_capture(ring, sealer)
    stale = capture._targets.shared
    assert stale is not None
    capture.close()
    state.weight.numpy()[3] = 5.0
    again = Capture(
        state, ring, sealer, Options(), schedule=Pace(1), constants={"frozen.w": digest_of(state.weight)}
    )
    again.share(stale)
    content = captured(again, ring, sealer, 20)
    # It is what it was restored as, so it is a constant still; the slot holds it.
    assert content.layout.constants is not None
    assert (content.constants_nonce, content.leaves["frozen.w"]) == (0, bytes_of(state.weight))
    again.close()


def test_another_constant_is_ordinary_until_a_region_holds_both(
    ring: SlotRing, sealer: _native.Sealer
) -> None:
    state, capture = frozen_capture(ring, sealer)
    first = captured(capture, ring, sealer, 7).constants_nonce
    late = torch.randn(LARGE - 8)
    state.more.append(late)
    for step in range(8, 17):
        content = captured(capture, ring, sealer, step)
        assert content.leaves["frozen.w"] == bytes_of(state.weight)
        assert content.leaves["frozen.more"] == bytes_of(late)
        assert content.constants_nonce == first
    wanted = capture.sharing_wanted()
    assert wanted is not None
    assert [leaf.name for leaf in wanted.leaves] == ["frozen.more", "frozen.w"]
    both = region_with(wanted, content)
    capture.share(both)
    for step in range(17, 20):
        content = captured(capture, ring, sealer, step)
        assert content.leaves["frozen.more"] == bytes_of(late)
        assert content.constants_nonce == both.nonce != first
        assert {leaf.name for leaf in content.layout.shard.leaves} == {"a.a"}
    assert capture.sharing_wanted() is None
    capture.close()


def test_what_is_made_row_major_for_each_snapshot_is_never_shared(
    ring: SlotRing, sealer: _native.Sealer
) -> None:
    weight = torch.randn(800, 500).t()
    state = Frozen(weight)
    capture = Capture(state, ring, sealer, Options(), schedule=Pace(1))
    for step in range(1, 9):
        content = captured(capture, ring, sealer, step)
    assert content.layout.constants is not None
    assert capture.sharing_wanted() is None
    # And where one is offered all the same (from a resume), it is not used.
    capture.share(region_of(content))
    content = captured(capture, ring, sealer, 9)
    assert (content.constants_nonce, content.leaves["frozen.w"]) == (0, bytes_of(weight))
    capture.close()


def test_the_first_capture_after_a_resume_names_the_region(ring: SlotRing, sealer: _native.Sealer) -> None:
    state, capture = frozen_capture(ring, sealer)
    shared = capture._targets.shared
    assert shared is not None
    capture.close()
    again = Capture(state, None, sealer, Options(), schedule=Pace(1), constants=shared.by_name())
    again.share(shared)
    # Slots need no room for what stands in the region.
    needed = again.room_needed(ordered=True)
    assert needed is not None
    assert needed[1] < 4 * LARGE
    again.set_slots(ring)
    assert captured(again, ring, sealer, 20).constants_nonce == shared.nonce
    again.close()


def test_slots_that_have_room_to_spare_are_told_of(ring: SlotRing, sealer: _native.Sealer) -> None:
    _, capture = frozen_capture(ring, sealer)
    assert capture.room_to_spare() is None  # no plan stands yet that leaves anything to the region
    captured(capture, ring, sealer, 7)
    spare = capture.room_to_spare()
    assert spare is not None
    assert all(slot.size.image_bytes > spare.image_bytes + 2 * LARGE for slot in ring.slots)
    assert spare.metadata_bytes > 1 << 16
    capture.close()
