"""A file system whose inodes are used up, and temporary folders that are full: each is called what it is."""

import errno
import tempfile
from pathlib import Path

import pytest
from torch import nn

import flashckpt
from flashckpt.memory.runtime import base_folder
from tests.memory.mounts import small_tmpfs
from tests.waiting import abandon


@pytest.mark.parametrize("inodes", [1, 2, 3, 4, 6])
def test_no_inodes_left_is_called_so(runtime: Path, inodes: int) -> None:
    """At each of the files that the start of a run makes: `df` shows room, and nothing else would say it."""
    with (
        small_tmpfs(64 << 20, inodes) as disk,
        pytest.raises(flashckpt.RunError, match=r"no inodes are left on this file system \(see df -i\)"),
    ):
        flashckpt.attach(disk / "runs" / "run", model=nn.Linear(4, 4))


def test_no_inodes_left_for_a_step(runtime: Path) -> None:
    options = flashckpt.Options(grace="1s", linger="0s")
    with small_tmpfs(64 << 20, 12) as disk:
        checkpointer = flashckpt.attach(disk / "run", every=1, options=options, model=nn.Linear(4, 4))
        checkpointer.step()
        with pytest.raises(flashckpt.PersistError, match="no inodes are left"):
            checkpointer.wait()
        abandon(checkpointer)


def test_a_full_temporary_folder_is_not_needed(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runtime folders are in shared memory: that no temporary file can be made says nothing of it."""

    def none_is_usable() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none_is_usable)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert base_folder() == "/dev/shm"
