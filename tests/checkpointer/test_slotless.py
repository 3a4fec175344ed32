"""Where no slot can be made, for whatever reason, the run ends in its first steps and says why."""

import os
import resource
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

import flashckpt
from tests.memory.mounts import small_tmpfs
from tests.processes import keepers_of
from tests.waiting import abandon, until


@pytest.mark.parametrize(("how", "reason"), [("small files", "File too large"), ("no descriptors", "files")])
def test_a_keeper_that_can_make_no_slot(how: str, reason: str, tmp_path: Path, runtime: Path) -> None:
    model = nn.Linear(64, 64)
    checkpointer = flashckpt.attach(tmp_path / "run", every=1, model=model)
    (keeper,) = keepers_of(runtime)
    used = max(int(name) for name in os.listdir(f"/proc/{keeper}/fd"))
    limits = {
        "small files": (resource.RLIMIT_FSIZE, 1 << 20),
        "no descriptors": (resource.RLIMIT_NOFILE, used + 1),
    }
    what, most = limits[how]
    before = resource.prlimit(keeper, what)
    resource.prlimit(keeper, what, (most, before[1]))

    def train() -> None:
        with torch.no_grad():
            model.weight += 1
        checkpointer.step()

    with pytest.raises(flashckpt.KeeperError, match=reason):
        until(train, "an error")
    resource.prlimit(keeper, what, before)
    abandon(checkpointer)


@pytest.mark.process
def test_a_runtime_folder_that_is_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here it is known at once."""
    with small_tmpfs(64 << 20) as runtime:
        subprocess.run(["mount", "-o", "remount,ro", str(runtime)], check=True)
        monkeypatch.setenv("FLASHCKPT_RUNTIME", str(runtime))
        with pytest.raises(flashckpt.KeeperError, match="Read-only file system"):
            flashckpt.attach(tmp_path / "run", every=1, model=nn.Linear(64, 64))
