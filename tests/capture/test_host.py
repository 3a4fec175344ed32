"""The host way: the content of a snapshot of CPU tensors, and the decisions of a boundary."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flashckpt import _native
from flashckpt.capture import BoundaryResult, Capture, Verdict
from flashckpt.capture.schedule import Pace
from flashckpt.memory.slot import SlotRing
from flashckpt.options import Options

from .conftest import make_slot
from .content import Content, State, exact, newest, resumed_dropping


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten())
    net.add_module("head", torch.nn.Linear(4 * 36, 3))
    return net


class Run:
    """A training loop: `train` is an iteration, `boundary` its end."""

    def __init__(self, ring: SlotRing | None, sealer: _native.Sealer, **options: object) -> None:
        self.model = model()
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.state = State(model=self.model, optimizer=self.optimizer)
        self.sealer, self.step = sealer, 0
        options.setdefault("schedule", Pace(1))
        self.capture = Capture(
            self.state, ring, sealer, Options(), optimizers=self.state.optimizers, attempt=(3, 4), **options
        )
        resumed_dropping(self.capture)

    def train(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(2, 3, 8, 8)).sum().backward()
        self.optimizer.step()

    def boundary(self, **how: object) -> BoundaryResult:
        self.step += 1
        return self.capture.boundary(self.step, lambda: b'{"step":%d}' % self.step, **how)

    def iterate(self, **how: object) -> BoundaryResult:
        self.train()
        return self.boundary(**how)

    def landed(self) -> None:
        assert self.sealer.drain(240)


@pytest.fixture
def run(ring: SlotRing, sealer: _native.Sealer) -> Iterator[Run]:
    run = Run(ring, sealer)
    yield run
    run.capture.close()


def check(run: Run, ring: SlotRing) -> Content:
    run.landed()
    content = newest(ring)
    assert content.step == run.step
    assert content.torn == []
    assert content.leaves == exact(run.state)
    assert content.values == b'{"step":%d}' % run.step
    return content


def captured(run: Run, ring: SlotRing) -> Content:
    """Capture the next boundary, and compare the snapshot with the state."""
    assert run.iterate().captured
    return check(run, ring)


def test_every_boundary_holds_the_exact_state(run: Run, ring: SlotRing) -> None:
    for _ in range(6):
        captured(run, ring)
    assert run.state.walks <= 2  # one plan for all of them


def test_record_and_metadata_match_the_capture(run: Run, ring: SlotRing) -> None:
    before_ns = time.monotonic_ns()
    run.iterate()
    run.landed()
    found = ring.newest_sealed()
    record = found[1].record
    # Not the wall clock: if it is set back, the older of two snapshots would count as the newer.
    assert before_ns <= record.captured_ns <= time.monotonic_ns()
    assert (record.attempt_number, record.attempt_nonce, record.step) == (3, 4, 1)
    assert record.generation == found[1].word.generation
    assert record.image_bytes == len(Content(found[0]).image)


def test_leaves_that_are_not_row_major_are_stored_row_major(run: Run, ring: SlotRing) -> None:
    run.model.to(memory_format=torch.channels_last)
    run.state.more["t"] = torch.arange(12.0).view(3, 4).t()
    run.state.more["half"] = torch.ones(3, dtype=torch.bfloat16)
    content = captured(run, ring)
    assert content.leaf("model.0.weight").stride == tuple(run.model[0].weight.stride())
    assert content.leaf("model.head.weight").stride is None


def test_writes_without_version_counters_are_in_the_next_snapshot(run: Run, ring: SlotRing) -> None:
    captured(run, ring)
    weight = run.model.head.weight
    version = weight._version
    weight.data.mul_(2)
    weight.detach().numpy()[0, 0] = 77.0
    assert weight._version == version  # neither is seen by version counters
    captured(run, ring)


def test_new_memory_and_another_tensor_in_the_same_place_are_followed(run: Run, ring: SlotRing) -> None:
    captured(run, ring)
    walks = run.state.walks
    run.model.head.weight.data = torch.randn_like(run.model.head.weight)
    captured(run, ring)
    assert run.state.walks == walks  # patched, not walked again
    state = run.optimizer.state[run.model.head.weight]
    state["exp_avg"] = torch.randn_like(state["exp_avg"])
    captured(run, ring)


def test_leaves_that_come_and_go_or_change_their_shape_change_the_plan(run: Run, ring: SlotRing) -> None:
    more = run.state.more
    more["a"] = torch.ones(4, 3)
    captured(run, ring)
    more["b"] = torch.zeros(5, dtype=torch.int64)
    assert "more.b" in captured(run, ring).leaves
    more["a"].t_()
    assert len(captured(run, ring).leaves["more.a"]) == 4 * 3 * 4
    more["a"].resize_(2, 2)
    assert len(captured(run, ring).leaves["more.a"]) == 2 * 2 * 4
    del more["a"]
    assert "more.a" not in captured(run, ring).leaves


def test_zero_size_and_scalar_leaves(run: Run, ring: SlotRing) -> None:
    run.state.more |= {
        "none": torch.empty(0, 7),
        "scalar": torch.tensor(3, dtype=torch.int16),
        "odd": torch.arange(7, dtype=torch.uint8),
        "complex": torch.ones(3, dtype=torch.complex128),
        "bool": torch.tensor([True, False]),
        "f8": torch.ones(5).to(torch.float8_e4m3fn),
    }
    assert captured(run, ring).leaves["more.none"] == b""


def test_without_slots_a_boundary_is_skipped_and_the_size_is_known(
    sealer: _native.Sealer, ring: SlotRing
) -> None:
    run = Run(None, sealer)
    assert run.capture.memory_needed() is None
    assert run.iterate().verdict is Verdict.SKIPPED
    needed = run.capture.memory_needed()
    assert needed[1] >= sum(len(data) for data in exact(run.state).values())
    run.capture.set_slots(ring)
    captured(run, ring)
    run.capture.close()


def test_a_state_that_outgrew_its_slots_reports_the_size_needed(run: Run, ring: SlotRing) -> None:
    run.iterate()
    run.state.more["big"] = torch.zeros(5 << 20)
    run.capture._planner.drop()
    outcome = run.iterate()
    assert outcome.verdict is Verdict.SKIPPED
    assert "outgrown" in outcome.reason
    needed = run.capture.memory_needed()
    assert needed[1] > 20 << 20


def test_the_newest_sealed_is_never_overwritten(run: Run, ring: SlotRing) -> None:
    for slot in ring.slots:
        slot.request_persist(1)  # the first snapshot in each slot waits for the keeper
    for _ in range(3):
        assert run.iterate().captured
        run.landed()
    kept = check(run, ring).step
    outcome = run.iterate()
    assert outcome.verdict is Verdict.SKIPPED
    assert newest(ring).step == kept


def test_an_order_ignores_the_schedule(ring: SlotRing, sealer: _native.Sealer) -> None:
    run = Run(ring, sealer, schedule=Pace(None))
    assert run.iterate().verdict is Verdict.NOT_DUE
    run.capture.order()
    assert run.iterate().captured
    assert [slot.asked for slot in ring.slots] == [1, 0, 0]
    assert run.iterate().verdict is Verdict.NOT_DUE
    run.capture.close()


def test_slots_with_the_same_index_are_distinguished(sealer: _native.Sealer) -> None:
    """A keeper that adopts slots of its predecessor may hold two slots with the same index."""
    ring = SlotRing([make_slot(0, 1 << 20, 16 << 20, nonce=nonce) for nonce in (7, 8, 9)])
    owners = {slot.name: owner for owner, slot in enumerate(ring.slots, 1)}
    run = Run(ring, sealer, owner=owners)
    written = set()
    for _ in range(6):
        captured(run, ring)
        found = ring.newest_sealed()
        written.add(found[0].name)
    assert len(written) > 1
    run.capture.close()
    for slot in ring.slots:
        slot.close()


@pytest.mark.parametrize("waits", [False, True])
def test_a_save_before_the_loop_leaves_automatic_snapshots_on(
    ring: SlotRing, sealer: _native.Sealer, waits: bool
) -> None:
    run = Run(ring, sealer, schedule=Pace("auto"))
    assert run.iterate(ordered=True).captured
    if waits:
        run.capture.wait()
    else:
        assert run.capture.boundary(run.step, lambda: b"{}", ordered=True).captured
    run.landed()
    assert run.iterate().captured
    run.capture.close()


def test_released_slots_are_not_read(run: Run, ring: SlotRing) -> None:
    run.capture.order()
    assert run.iterate().captured
    fresh = SlotRing([make_slot(i, 1 << 20, 16 << 20) for i in range(3)])
    run.capture.set_slots(fresh)
    for slot in ring.slots:
        slot.close()
    for _ in range(3):
        captured(run, fresh)
    run.capture.close()
    for slot in fresh.slots:
        slot.close()


class Writer:
    """A thread that writes leaves at the worst moment, reproducibly: after the copy of the bytes and before a
    capture has returned."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, copying: str) -> None:
        self.tensor: torch.Tensor | None = None
        copy = getattr(_native, copying)

        def written(*arguments: Any) -> Any:
            result = copy(*arguments)
            if self.tensor is not None:
                tensor, self.tensor = self.tensor, None
                tensor.data.add_(1)
            return result

        monkeypatch.setattr(_native, copying, written)


@pytest.mark.parametrize(("leaf", "copying"), [("ema", "copy_digest"), ("odd", "digest")])
def test_a_host_leaf_that_is_written_while_it_is_copied_is_not_sealed(
    ring: SlotRing,
    sealer: _native.Sealer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    leaf: str,
    copying: str,
) -> None:
    run = Run(ring, sealer)
    more = run.state.more
    more |= {"ema": torch.zeros(3000), "odd": torch.zeros(30, 50).t()}
    captured(run, ring)
    caplog.set_level("WARNING", "flashckpt")
    for times in (1, 2):
        with monkeypatch.context() as patched:
            Writer(patched, copying).tensor = more[leaf]
            assert run.iterate().captured
        run.landed()
        assert newest(ring).step == run.step - 1
        for _ in range(4):  # beyond the captures in which every leaf is checked
            captured(run, ring)
        assert run.capture.report()["snapshots_lost"] == times
    assert [r.getMessage().split(",")[0] for r in caplog.records] == [f"more.{leaf}"]
    run.capture.close()
