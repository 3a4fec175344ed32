"""The runtime folder and life locks, attacked by other processes, forks and planted files."""

import fcntl
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from flashckpt.errors import KeeperError
from flashckpt.memory.runtime import (
    LifeLock,
    RuntimeFolder,
    enter,
    identity_of,
    is_alive,
    trainer_lock_name,
)
from flashckpt.store.local import LocalStore
from tests.descriptors import closed_after
from tests.memory.conftest import IDENTITY

LOCK = "trainer-00000-1-0.lock"


def asked_elsewhere(folder: RuntimeFolder, name: str) -> bool:
    """What another process says of a lock."""
    code = (
        "import sys; from flashckpt.memory.runtime import *;"
        "print(is_alive(RuntimeFolder.at(sys.argv[1]), sys.argv[2]))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, folder.path, name], capture_output=True, text=True, check=True
    )
    return found.stdout.strip() == "True"


def test_the_folder_is_private_and_opens_again(folder: RuntimeFolder, runtime: Path) -> None:
    assert folder.path == str(runtime / f"flashckpt-{os.geteuid()}" / IDENTITY)
    assert stat.S_IMODE(os.stat(folder.path).st_mode) == 0o700
    assert closed_after(RuntimeFolder.at(folder.path)).identity == bytes.fromhex(IDENTITY)
    assert folder.exists()
    with pytest.raises(FileNotFoundError):
        RuntimeFolder.open(str(runtime), "f" * 32, create=False)


def test_probing_ones_own_lock_says_alive_and_does_not_drop_it(folder: RuntimeFolder) -> None:
    life = LifeLock.acquire(folder, LOCK)
    assert life is not None
    for _ in range(3):
        assert is_alive(folder, LOCK)
        assert is_alive(closed_after(RuntimeFolder.at(folder.path)), LOCK)
    assert LifeLock.acquire(folder, LOCK) is None
    assert asked_elsewhere(folder, LOCK)
    life.release(folder)
    assert not is_alive(folder, LOCK)
    assert not asked_elsewhere(folder, LOCK)


def test_a_lock_dies_with_its_process_and_is_not_inherited(folder: RuntimeFolder) -> None:
    """A loader's worker outlives the trainer: for it, too, the trainer is dead. It opens the folder itself:
    what was open is not open in it."""
    told, telling = os.pipe()
    asked, asking = os.pipe()
    owner = os.fork()
    if owner == 0:
        if LifeLock.acquire(RuntimeFolder.at(folder.path), LOCK) is not None and os.fork() == 0:
            folder = closed_after(RuntimeFolder.at(folder.path))
            os.write(telling, b"alive" if is_alive(folder, LOCK) else b"dead")
            os.read(asked, 1)
            os.write(telling, b"alive" if is_alive(folder, LOCK) else b"dead")
            os._exit(0)
        signal.pause()
    assert os.read(told, 5) == b"alive"
    assert is_alive(folder, LOCK)
    os.kill(owner, signal.SIGKILL)
    os.waitpid(owner, 0)
    assert not is_alive(folder, LOCK)
    os.write(asking, b"?")
    assert os.read(told, 5) == b"dead"
    for descriptor in (told, telling, asked, asking):
        os.close(descriptor)


def test_a_lock_is_held_from_the_moment_that_its_name_is_there(
    folder: RuntimeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keepers remove names without a holder: none may be there before its lock is taken. One that is removed
    before that is made again."""
    before: list[list[str]] = []
    taken = fcntl.fcntl

    def taking(descriptor: int, command: int, argument: bytes) -> object:
        if command == fcntl.F_SETLK:
            before.append(folder.names())
            if len(before) <= 2:
                folder.remove(f"unborn-{LOCK}")
        return taken(descriptor, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", taking)
    life = LifeLock.born(folder, LOCK)
    assert before == [[f"unborn-{LOCK}"]] * 3
    assert folder.names() == [LOCK]
    assert life.stands(folder)
    assert asked_elsewhere(folder, LOCK)
    life.release(folder)


def test_a_lock_whose_name_is_taken_away_does_not_stand(folder: RuntimeFolder) -> None:
    old = LifeLock.acquire(folder, LOCK)
    assert old is not None
    folder.remove(LOCK)
    new = LifeLock.acquire(folder, LOCK)
    assert new.stands(folder)
    assert not old.stands(folder)
    old.release(folder)
    assert new.stands(folder)
    assert is_alive(folder, LOCK)
    new.release(folder)


def test_join_takes_a_folder_that_a_leaving_keeper_removes(runtime: Path) -> None:
    folder, life = enter(str(runtime), IDENTITY, trainer_lock_name(0))
    closed_after(folder)
    folder.discard()
    assert folder.exists(), "a folder with a lock in it is not empty"
    life.release(folder)
    folder.discard()
    assert not folder.exists()
    folder, life = enter(str(runtime), IDENTITY, trainer_lock_name(0))
    closed_after(folder)
    assert folder.exists()
    life.release(folder)


def test_a_copied_run_is_another(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    a, b = (LocalStore(str(tmp_path / name)).place() for name in ("a", "b"))
    assert identity_of("r", a) != identity_of("r", b)
    assert identity_of("r", a) != identity_of("s", a)
    assert identity_of("r", a) == identity_of("r", a)


def planted(folder: Path, kind: str) -> None:
    if kind == "mode":
        folder.mkdir(mode=0o700)
        folder.chmod(0o755)
    elif kind == "link":
        (folder.parent / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(folder.parent / "elsewhere")
    elif kind == "file":
        folder.write_text("not a folder")
    elif kind == "owner":
        folder.mkdir(mode=0o700)
        os.chown(folder, 12345, 12345)


OF_ROOT = ("owner",) if os.geteuid() == 0 else ()
"""What only root can plant: it can give a file away."""


@pytest.mark.parametrize("which", ["user", "run"])
def test_a_planted_folder_is_refused_and_left_alone(runtime: Path, which: str) -> None:
    for kind in ("mode", "link", "file", *OF_ROOT):
        base = runtime / kind
        base.mkdir()
        user = base / f"flashckpt-{os.geteuid()}"
        if which == "run":
            user.mkdir(mode=0o700)
        target = user if which == "user" else user / IDENTITY
        planted(target, kind)
        before = os.lstat(target)
        with pytest.raises(KeeperError, match="left as it is"):
            RuntimeFolder.open(str(base), IDENTITY)
        after = os.lstat(target)
        assert (before.st_mode, before.st_uid, before.st_ino) == (after.st_mode, after.st_uid, after.st_ino)
        assert not any((target.parent / "elsewhere").glob("*")), "nothing is made behind a link"


def test_a_planted_lock_is_refused(folder: RuntimeFolder, runtime: Path) -> None:
    other = runtime / "other"
    other.touch(mode=0o600)
    path = Path(folder.path) / LOCK
    for kind in ("mode", "symlink", "hardlink", "pipe", *OF_ROOT):
        if kind == "symlink":
            path.symlink_to(other)
        elif kind == "hardlink":
            path.hardlink_to(other)
        elif kind == "pipe":
            os.mkfifo(path, 0o600)
        else:
            path.touch(mode=0o600)
            path.chmod(0o666) if kind == "mode" else os.chown(path, 12345, 12345)
        with pytest.raises(KeeperError, match="left as it is"):
            LifeLock.acquire(folder, LOCK)
        path.unlink()  # it was left


def test_names_never_lead_out(folder: RuntimeFolder, runtime: Path) -> None:
    for name in ("", ".", "..", "a/b", "/etc/passwd", "x" * 65, "a\0b"):
        with pytest.raises(KeeperError):
            folder.open_file(name)
        with pytest.raises(KeeperError):
            RuntimeFolder.open(str(runtime), name)
