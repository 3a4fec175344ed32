"""Starting a run that hangs, and waiting for what the ledger says of it."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests import zygote
from tests.descriptors import readable
from tests.events import ledger
from tests.keeper.driver import eventually

HANG_AT = 5
# Long enough that no ordinary step of a few milliseconds takes it on a busy machine.
PATIENCE = "4s"

Line = dict[str, Any]


class Run:
    """A trainer in its own process, which hangs in iteration HANG_AT. fresh: in an interpreter of its own."""

    def __init__(
        self, folder: Path, hang: str, hang_at: int = HANG_AT, fresh: bool = False, **options: Any
    ) -> None:
        self.folder, self.hang_at = folder, hang_at
        arguments = {"options": {"watchdog": PATIENCE, **options}}
        module = ["tests.watchdog.trainer", hang, str(folder), str(hang_at), json.dumps(arguments)]
        self.process = zygote.start(module, fresh=fresh, stdin=zygote.PIPE, stdout=zygote.PIPE)

    @property
    def pid(self) -> int:
        return self.process.pid

    def hangs(self) -> "Run":
        assert self.line() == f"hangs {self.hang_at}\n"
        return self

    def line(self) -> str:
        assert self.process.stdout is not None
        assert readable(self.process.stdout), "the trainer says nothing"
        return self.process.stdout.readline()

    def release(self) -> None:
        """Let it go on from where it hangs."""
        self.process.stdin.write("x")
        self.process.stdin.flush()

    def finishes(self) -> None:
        assert self.line() == "finished\n"
        assert self.process.wait(120) == 0

    def lives(self) -> bool:
        return self.process.poll() is None

    def told(self, event: str) -> list[Line]:
        """What the ledger holds of an event about the hang; an ordinary step may be slow on its own."""
        if not (self.folder / "events").is_dir():
            return []
        lines = [line for line in ledger(self.folder) if line["event"] == event]
        return [line for line in lines if line.get("boundaries", self.hang_at) == self.hang_at]

    def wait_told(self, event: str) -> Line:
        line: Line = eventually(lambda: self.told(event), timeout_s=120)[0]
        return line


@contextlib.contextmanager
def running(folder: Path, hang: str, **options: Any) -> Iterator[Run]:
    run = Run(folder, hang, **options)
    try:
        yield run
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(run.pid, 9)
        run.process.wait()
        for stream in (run.process.stdin, run.process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()
