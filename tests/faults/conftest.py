"""Storage that fails on demand: a shim preloaded into keepers, switched by a page that both map."""

import mmap
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

WRITE, SYNC, LINK, READ = 1, 2, 4, 8
_MODES = {"well": 0, "fail": 1, "short": 2, "slow": 3, "hang": 4, "refuse": 5}


class Faults:
    """What the shim does from now on to the calls of a keeper on files below a folder. "refuse": only to
    those on folders, with the error `micros`."""

    def __init__(self, page: mmap.mmap) -> None:
        self._page = page

    def become(self, mode: str, calls: int = WRITE | SYNC | LINK, micros: int = 0) -> None:
        self._page[4:12] = struct.pack("<II", calls, micros)
        self._page[0:4] = struct.pack("<I", _MODES[mode])

    @property
    def hits(self) -> int:
        """Calls that were struck so far."""
        found: int = struct.unpack("<I", self._page[12:16])[0]
        return found


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler: storage cannot be made to fail")
    library = tmp_path_factory.mktemp("shim") / "shim.so"
    source = Path(__file__).with_name("shim.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library


@pytest.fixture
def faults(shim: Path, tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    """Faults below tmp_path/run, for keepers that this test starts."""
    control = tmp_path / "control"
    control.write_bytes(bytes(4096))
    monkeypatch.setenv("FAULT_CONTROL", str(control))
    monkeypatch.setenv("FAULT_FOLDER", str(tmp_path / "run"))
    monkeypatch.setenv("LD_PRELOAD", str(shim))
    with open(control, "r+b") as file, mmap.mmap(file.fileno(), 4096) as page:
        made = Faults(page)
        yield made
        made.become("well")
