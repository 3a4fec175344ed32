"""Plain values by name: what is changed in place comes back in place, and a resume says what it restored."""

import collections
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import flashckpt
from flashckpt import OptionError, StateError
from tests.checkpointer.test_loop import Job, loader

pytestmark = pytest.mark.usefixtures("runtime")


def test_a_dict_and_a_list_come_back_in_place(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="flashckpt")

    def train(epochs: int) -> tuple[dict[str, Any], list[float], collections.deque[int]]:
        job, own, seen = Job(), {"lr": 20.0, "best": {"loss": None}}, [0.0]
        last: collections.deque[int] = collections.deque(maxlen=2)
        held = own["best"], seen
        named = {**job.named, "own": own, "seen": seen, "last": last}
        for number, x in enumerate(flashckpt.loop(loader(2), tmp_path / "run", epochs=epochs, **named)):
            own["lr"] /= 2  # type: ignore[operator]
            held[0]["loss"] = number  # type: ignore[index]
            held[1].append(own["lr"])  # type: ignore[arg-type]
            last.append(number)
            job.train(x)
        return own, seen, last

    train(1)
    own, seen, last = train(2)
    assert own["lr"] == 20.0 / 2**4
    assert seen == [0.0, 10.0, 5.0, 2.5, 1.25]
    assert list(last) == [0, 1]
    [said] = [r.getMessage() for r in caplog.records if "resumed from step" in r.getMessage()]
    assert "model, optimizer, own, seen, last, the random numbers" in said
    assert "other variables of the program are not" in said


@pytest.mark.parametrize("value", [20.0, (1, 2)])
def test_a_value_that_cannot_be_changed_in_place_is_refused(value: object, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"lr=.*neither an option.*own="):
        flashckpt.attach(tmp_path / "run", lr=value, **Job().named)
    assert not (tmp_path / "run").exists()


def test_values_that_grow_too_large_are_not_captured_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flashckpt.checkpointer.resume.MAX_VALUES_BYTES", 1 << 20)
    job, own = Job(), {"rows": list[str]()}
    with flashckpt.attach(tmp_path / "run", every=1, persist_every=1, own=own, **job.named) as run:
        for number in range(6):
            job.train(torch.ones(1, 4))
            if number == 2:
                own["rows"] += ["x" * 1000] * 1100
            run.step()
            if number == 4:
                assert run.report()["snapshots_skipped"] >= 3
                with pytest.raises(StateError, match=r"own\.rows takes 1,1.* bytes as plain values \(list\)"):
                    run.wait()
                own["rows"].clear()
        run.wait()
    assert flashckpt.steps(tmp_path / "run")[-1] == 6
    said = [r.getMessage() for r in caplog.records if "is not saved, and training" in r.getMessage()]
    assert len(said) == 1
    assert "own.rows" in said[0]
