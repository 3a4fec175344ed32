"""Slots that were granted and are not used do not stay in memory, though the keeper lives on."""

import errno
import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import flashckpt
from flashckpt import _native
from flashckpt.memory.region import SlotSize
from tests.checkpointer.damaged import quarantined
from tests.checkpointer.test_loop import Job
from tests.events import ledger
from tests.waiting import abandon, newest_sealed, until


def regions(runtime: Path) -> list[Path]:
    return sorted(runtime.glob("*/*/slot-*"))


def test_slots_that_cannot_be_made_usable(
    tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "no memory can be faulted in")

    monkeypatch.setattr(_native, "populate", refuses)
    monkeypatch.setattr("flashckpt.checkpointer.slots._RETRY_S", 1.0)
    with flashckpt.attach(tmp_path / "run", every=None, **Job().named) as checkpointer:
        keeper_link = checkpointer._keeper_link
        keeper_link.slots.ask(SlotSize(4096, 1 << 16))
        until(lambda: keeper_link.slots.error is not None, "the failure")
        until(lambda: not regions(runtime), "the regions to go")
        monkeypatch.undo()
        keeper_link.slots.ask(SlotSize(4096, 1 << 16))
        until(lambda: keeper_link.slots.ready, "slots")
        assert len(regions(runtime)) == 3


def test_another_model_is_refused_and_leaves_nothing_but_what_survived(run: Path, runtime: Path) -> None:
    other = Job(width=5)
    before = other.model.weight.detach().clone()
    with pytest.raises(flashckpt.MismatchError, match="no older step") as caught:
        flashckpt.attach(run, **other.named)
    assert any(name == "model.weight" for name, *_ in caught.value.differences)
    assert torch.equal(other.model.weight, before)
    assert not quarantined(run)
    until(lambda: not regions(runtime), "the region that the step was read into to go")
    with flashckpt.attach(run, **Job().named) as checkpointer:
        assert (checkpointer.completed, checkpointer.resumed and checkpointer.resumed.tier) == (4, "local")


def mapped() -> int:
    return Path("/proc/self/maps").read_text().count("/slot-")


def test_without_any_grace_the_run_is_let_go_all_the_same(tmp_path: Path, runtime: Path) -> None:
    for _ in range(2):
        options = flashckpt.Options(grace="0s")
        with flashckpt.attach(tmp_path / "run", every=None, options=options, **Job().named) as checkpointer:
            checkpointer.save()
            assert mapped() == 3
        assert mapped() == 0

    def told() -> list[str]:
        return [line["event"] for line in ledger(tmp_path / "run") if line["event"] in ("close", "death")]

    until(lambda: "death" in told() or told().count("close") >= 4, "both sides to tell of both ends")
    assert "death" not in told()


@pytest.mark.parametrize("tier", ["memory", "local"])
def test_what_was_resumed_from_does_not_wait_for_the_garbage_collector(
    tmp_path: Path, runtime: Path, kill_keepers: Callable[..., None], tier: str
) -> None:
    """Training loops turn it off; and a region that is mapped still takes its memory."""
    run = tmp_path / "run"
    checkpointer = flashckpt.attach(run, every=None, **Job().named)
    checkpointer.save()
    checkpointer.wait()
    abandon(checkpointer)  # so that its slots survive it
    del checkpointer
    if tier == "local":
        kill_keepers(remove_regions=True)
    gc.collect()
    gc.disable()
    try:
        with flashckpt.attach(run, every=None, **Job().named) as checkpointer:
            assert checkpointer.resumed.tier == tier
            assert mapped() == 0
    finally:
        gc.enable()


def test_slots_that_are_asked_for_again_though_there_are_some_are_kept(tmp_path: Path, runtime: Path) -> None:
    """The answer came just as somebody asked: the keeper has nothing to add, and snapshots go on."""
    model = torch.nn.Linear(8, 8)
    with flashckpt.attach(tmp_path / "run", every=None, persist_every=None, model=model) as checkpointer:
        checkpointer.save()
        slots = checkpointer._keeper_link.slots
        before = slots.ring
        assert before is not None
        slots.ask(SlotSize(1, 1))
        until(lambda: not slots.asked, "an answer")
        with torch.no_grad():
            model.weight.add_(1.0)
        checkpointer.save()
        assert slots.ring is before
        assert newest_sealed(checkpointer) == checkpointer.completed
