"""`attach(remote=…)`: what is written wrongly is refused before anything is done; a server that is away is no
reason not to train."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import flashckpt
from flashckpt import Keep, OptionError, Options, RunError
from flashckpt.checkpointer import session as remote_module
from flashckpt.store import obstore_client
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("runtime")


def trained(run: Path, steps: int, **options: Any) -> dict[str, float]:
    """Train and save some steps more; what the run reports after each, and before it ends."""
    with flashckpt.attach(run, every=1, persist_every=1, model=nn.Linear(2, 2), **options) as made:
        for _ in range(steps):
            made.step()
        made.wait()
        return made.report()


def test_a_run_and_its_remote(tmp_path: Path) -> None:
    run, there = tmp_path / "run", tmp_path / "remote"
    model = nn.Linear(2, 2)
    with flashckpt.attach(run, remote=there, remote_keep=Keep(last=5), model=model) as made:
        for _ in range(3):
            with torch.no_grad():
                model.weight += 1
            made.step()
            made.save()
            made.wait()
            until(lambda: made.report()["newest_remote_step"] == made.completed, "the step in the remote")
        report = made.report()
    assert report["remote_steps"] == 3
    assert report["remote_failures"] == report["remote_steps_skipped"] == 0
    assert flashckpt.steps(there) == [1, 2, 3]
    assert flashckpt.verify(there).ok
    assert torch.equal(flashckpt.load(there)["model.weight"], model.weight)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"remote_every": 5}, "remote_every=5 needs a remote"),
    ({"remote_keep": Keep(last=2)}, "remote_keep=.* needs a remote"),
    ({"remote": 5}, "remote=5 is invalid.*a folder"),
    ({"remote": "far", "remote_every": "often"}, "remote_every='often' is not a duration"),
    ({"remote": "far", "remote_every": 0}, "remote_every=0 is invalid.*a duration"),
    ({"remote": "far", "remote_every": True}, "remote_every=True is invalid.*a duration"),
    ({"remote": "far", "remote_keep": 3}, "remote_keep=3 is invalid.*a flashckpt.Keep"),
    ({"remote": ""}, "path is empty"),
    ({"remote": "nonsense://bucket/run"}, "supports nonsense://"),
    ({"remote": "s3://key:geheim@bucket/run"}, "a user or a password"),
    ({"remote": "run"}, "one is in the other"),
    ({"remote": "run/remote"}, "one is in the other"),
    ({"remote": "."}, "one is in the other"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG, ids=str)
def test_what_cannot_be_is_refused_before_anything_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionError, match=message) as caught:
        flashckpt.attach("run", model=nn.Linear(2, 2), **wrong)
    assert "geheim" not in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_a_place_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"The remote .*file cannot be used: Not a directory"):
        flashckpt.attach(tmp_path / "run", remote=tmp_path / "file", model=nn.Linear(2, 2))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("server", ["refuses", "hangs"])
def test_a_server_that_is_away(
    tmp_path: Path,
    silent: str,
    server: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(obstore_client, "_BRIEF_DEADLINE_S", 3.0 if server == "hangs" else 0.3)
    monkeypatch.setattr(remote_module, "_REMOTE_TIMEOUT_S", 0.3 if server == "hangs" else 60.0)
    keys = {"access_key_id": "a", "secret_access_key": "geheim", "region": "eu"}
    options = Options(
        grace="1s",
        storage_options={**keys, "endpoint": "http://127.0.0.1:9" if server == "refuses" else silent},
    )
    trained(tmp_path / "run", 1)  # a run that is not there yet begins with none that does not answer
    report = trained(tmp_path / "run", 2, remote="s3://bucket/run", options=options)
    assert (report["newest_committed_step"], report["newest_remote_step"]) == (3, -1)
    assert "the mirror (remote=s3://bucket/run) cannot be read" in caplog.text
    assert "geheim" not in caplog.text
    assert flashckpt.steps(tmp_path / "run")[-1] == 3
