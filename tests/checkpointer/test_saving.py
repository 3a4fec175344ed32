"""What save() and wait() promise: a snapshot that was lost is ordered again or told, never passed over; a
stop in an epoch is not overwritten by what comes after it."""

import errno
from pathlib import Path

import pytest
import torch
from torch import nn

import flashckpt
from flashckpt import PersistError, RunError, _native
from flashckpt.capture.slot_writer import SlotWriter
from flashckpt.store.local import LocalStore
from tests.checkpointer.test_loop import Job, loader
from tests.waiting import abandon, until, until_slots

pytestmark = pytest.mark.usefixtures("runtime")


@pytest.fixture
def torn(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Steps whose snapshots are refused by their seals, as for a leaf that was written under its copy."""
    steps: set[int] = set()
    seal = SlotWriter.seal

    def spoiled(
        target: SlotWriter,
        sealer: object,
        waits: object,
        moves: object,
        step: int,
        *of: object,
        **more: object,
    ) -> None:
        if step in steps:
            target.table[0] = _native.EMPTY_DIGEST
        seal(target, sealer, waits, moves, step, *of, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(SlotWriter, "seal", spoiled)
    return steps


def test_the_first_save_of_a_run_waits_for_memory(tmp_path: Path) -> None:
    """It passed its boundary by, since there were no slots yet, and wait() said nothing of it."""
    run, job = str(tmp_path / "run"), Job()
    checkpointer = flashckpt.attach(run, every=None, persist_every=None, **job.named)
    for x in checkpointer.batches(loader()):
        if checkpointer.completed == 2:
            checkpointer.wait()
            assert flashckpt.steps(run) == [2]
            break
        job.train(x)
        if checkpointer.completed == 1:
            checkpointer.save()
    abandon(checkpointer)


def test_a_save_that_waits_for_a_slot_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order stands until a boundary finds a slot: until then nobody is told that it is safe."""
    run, job = str(tmp_path / "run"), Job()
    checkpointer = flashckpt.attach(run, every=None, persist_every=None, **job.named)
    batches = checkpointer.batches(loader(8))
    for _ in range(3):
        job.train(next(batches))
        until_slots(checkpointer)
    ring = checkpointer._keeper_link.slots.ring
    assert ring is not None
    with monkeypatch.context() as full:
        full.setattr(type(ring), "take", lambda self: None)
        checkpointer.save()
        checkpointer.wait()  # its boundary is to come
        job.train(next(batches))
        with pytest.raises(PersistError, match="the order stands for the next one"):
            checkpointer.wait()
    job.train(next(batches))
    checkpointer.wait()
    assert len(flashckpt.steps(run)) == 1
    abandon(checkpointer)


@pytest.mark.every_set
@pytest.mark.parametrize("last", [6, 4])
def test_a_save_whose_snapshot_is_torn_is_of_the_boundary_after_it(
    tmp_path: Path, torn: set[int], last: int
) -> None:
    """And an error where none follows."""
    run, job = str(tmp_path / "run"), Job()
    torn.add(4)
    checkpointer = flashckpt.attach(run, every=None, persist_every=None, **job.named)
    for x in checkpointer.batches(loader(8)):
        until_slots(checkpointer)
        job.train(x)
        if checkpointer.completed == 3:
            checkpointer.save()
        if checkpointer.completed == 4:
            with pytest.raises(PersistError, match="Step 4"):
                checkpointer.wait()  # it is taken again at the next boundary, and not safe yet
        if checkpointer.completed == last:
            break
    if last == 6:
        checkpointer.wait()
        assert flashckpt.steps(run) == [5]
        checkpointer.close()
        return
    for call in (checkpointer.wait, checkpointer.close):
        with pytest.raises(PersistError, match="Step 4"):
            call()


def test_a_final_snapshot_that_cannot_be_sealed_is_no_normal_end(tmp_path: Path, torn: set[int]) -> None:
    run, job = str(tmp_path / "run"), Job()
    torn |= {4, 5, 6}
    batches = flashckpt.loop(loader(), run, every=1, **job.named)

    def train() -> None:
        for x in batches:
            until_slots(batches.checkpointer)
            job.train(x)

    with pytest.raises(PersistError, match="6"):
        train()
    again = flashckpt.attach(run, **Job().named)
    assert again.completed == 3
    again.close()


def test_what_the_keeper_discards_before_wait_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 2 is sealed, and a byte of it flips; nobody waits yet when the audit finds that."""
    run, job = str(tmp_path / "run"), Job()
    checkpointer = flashckpt.attach(run, every=None, persist_every=None, **job.named)
    batches = checkpointer.batches(loader())
    job.train(next(batches))
    until_slots(checkpointer)
    job.train(next(batches))
    checkpointer.step()
    request = type(checkpointer._keeper_link.slots).request_persist

    def flipping(slots: object) -> None:
        ring = slots.ring  # type: ignore[attr-defined]
        slot, sealed = ring.newest_sealed()
        view = slot.image_view
        view[sealed.record.data_start] ^= 1
        request(slots)  # type: ignore[arg-type]

    monkeypatch.setattr(type(checkpointer._keeper_link.slots), "request_persist", flipping)
    checkpointer.save()
    monkeypatch.undo()
    ring = checkpointer._keeper_link.slots.ring
    assert ring is not None
    until(lambda: ring.newest_sealed() is None, "the keeper's audit")
    with pytest.raises(PersistError, match="not those of its boundary"):
        checkpointer.wait()
    abandon(checkpointer)


def test_a_save_after_a_stop_in_an_epoch_leaves_the_stop_as_it_is(tmp_path: Path) -> None:
    """What follows the batches of an epoch that is not over is done again when the epoch is."""

    def train(run: str, stop_at: int | None) -> tuple[torch.Tensor, int]:
        torch.manual_seed(3)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        named = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        data = loader()
        with flashckpt.attach(run, every=1, **named) as checkpointer:
            for epoch in checkpointer.epochs(2):
                for taken, x in enumerate(checkpointer.batches(data), 1):
                    optimizer.zero_grad()
                    (model(x) / 100).square().mean().backward()
                    optimizer.step()
                    if (epoch, taken) == (0, stop_at):
                        checkpointer.stop()
                scheduler.step()
                checkpointer.save()
        return model.weight.detach().clone(), scheduler.last_epoch

    whole = train(str(tmp_path / "whole"), None)
    train(str(tmp_path / "cut"), 3)
    rest = train(str(tmp_path / "cut"), None)
    assert rest[1] == whole[1] == 2
    assert torch.equal(rest[0], whole[0])


def test_an_attach_that_fails_at_its_end_leaves_no_hooks(tmp_path: Path) -> None:
    class Fickle:
        """Fails when it is asked after everything is attached."""

        asked = 0

        def state_dict(self) -> dict[str, int]:
            self.asked += 1
            if self.asked == 3:
                raise ArithmeticError("not now")
            return {}

        def load_state_dict(self, state: dict[str, int]) -> None:
            pass

    run, job = str(tmp_path / "run"), Job()
    with pytest.raises(ArithmeticError) as kept:
        flashckpt.attach(run, fickle=Fickle(), **job.named)
    assert kept.value is not None, "and with it the frames of the attach"
    assert not job.model._forward_pre_hooks
    assert not job.optimizer._optimizer_step_pre_hooks
    flashckpt.attach(run, **job.named).close()


def test_a_run_goes_on_after_an_object_gave_up_its_tensors(tmp_path: Path) -> None:
    class Best:
        """The best weights so far, until they are used up."""

        def __init__(self) -> None:
            self.weight: torch.Tensor | None = torch.zeros(3)

        def state_dict(self) -> dict[str, object]:
            return {"weight": self.weight}

        def load_state_dict(self, state: dict[str, object]) -> None:
            self.weight = state["weight"]  # type: ignore[assignment]

    run, job, best = str(tmp_path / "run"), Job(), Best()
    batches = flashckpt.loop(loader(), run, every=1, best=best, **job.named)
    for x in batches:
        until_slots(batches.checkpointer)
        job.train(x)
        if batches.completed == 3:
            best.weight = None
    again = Best()
    flashckpt.attach(run, best=again, **Job().named).close()
    assert again.weight is None


def test_a_start_that_cannot_be_written_says_what_became_of_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, job = str(tmp_path / "run"), Job()
    for x in flashckpt.loop(loader(), run, **job.named):
        job.train(x)
    create = LocalStore.create

    def full(store: LocalStore, path: str, data: bytes) -> bool:
        if path.startswith("catalogue/"):
            raise OSError(errno.ENOSPC, "No space left on device", path)
        return create(store, path, data)

    monkeypatch.setattr(LocalStore, "create", full)
    other = Job()
    with pytest.raises(RunError, match="No space left on device.*already that of step 6"):
        flashckpt.attach(run, **other.named)
    assert torch.equal(other.model.weight, job.model.weight)
    monkeypatch.undo()
    again = flashckpt.attach(run, **Job().named)
    assert again.completed == 6
    again.close()
