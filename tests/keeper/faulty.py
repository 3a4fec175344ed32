"""A real keeper on storage that fails or hangs as a test orders, by files in a folder of its own.

`write`: "COUNT ERRNO": so many writes of a shard fail, after some bytes. `write.long`: what failed is not
tried again by itself for days, as after many failures. `write.pause`, `remove.pause`, `audit.pause`: as long
as the file is there, a shard that was written, the removal of a file, or a window of an audit does not come
to its end; `….paused` appears. `copy.pause`: the same of a step that is copied to the remote, whose shard is
not there yet. `cache.pause`: the same of a snapshot that is copied into the cache, which counts as hanging
after half a second. `cache.eio`: no large leaf in the cache can be read. `cache.impatient`, there before the
keeper is: a start waits for half a second until the cache is read. `audit.windows` grows by a byte with each
window, of 64 KiB here.
"""

import errno
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flashckpt import _native
from flashckpt.keeper.__main__ import run
from flashckpt.memory.cache_folder import CacheFolder
from flashckpt.persist import audit, slot_cache
from flashckpt.persist.queue import Queue
from flashckpt.replication.run_copy import StepCopier
from flashckpt.store.local import LocalStore
from tests.keeper.driver import ROOT, eventually, runtime_of
from tests.keeper.fake import keeper_pid

_DAYS_S = 1e6
_LEAF_BYTES = 32 << 10


@contextmanager
def faulty_keeper(run: Path, runtime: Path, faults: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The run's keeper, elected before any trainer comes; killed at the end."""
    faults.mkdir(exist_ok=True)
    folder = runtime_of(run, runtime)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.keeper.faulty", str(run), folder.path, str(faults)],
        cwd=ROOT,
        env={**os.environ, "FLASHCKPT_RUNTIME": str(runtime)},
    )
    try:
        eventually(lambda: keeper_pid(folder) == process.pid)
        yield process
    finally:
        process.kill()
        process.wait(240)


def _pause(faults: Path, name: str) -> None:
    while (faults / f"{name}.pause").exists():
        (faults / f"{name}.paused").touch()
        time.sleep(0.005)


def harm(faults: Path) -> None:
    write, remove, failed = _native.write_file, LocalStore.remove, Queue._failed

    def write_file(*arguments: Any, **named: Any) -> Any:
        order = faults / "write"
        left, number = map(int, order.read_text().split()) if order.exists() else (0, 0)
        if left:
            order.write_text(f"{left - 1} {number}")
            _native.fetch_add(named["progress"], 4096)
            raise OSError(number, os.strerror(number), arguments[0])
        result = write(*arguments, **named)
        _pause(faults, "write")
        return result

    def slow_remove(store: LocalStore, path: str) -> None:
        _pause(faults, "remove")
        remove(store, path)

    def failed_for_long(queue: Queue, job: Any, outcome: Any) -> None:
        failed(queue, job, outcome)
        if (faults / "write.long").exists():
            job.retry.wait(time.monotonic(), _DAYS_S)

    hashes = audit._hashes

    def slow_hashes(*arguments: Any, **named: Any) -> Any:
        with open(faults / "audit.windows", "ab") as file:
            file.write(b".")
        found = hashes(*arguments, **named)
        _pause(faults, "audit")
        return found

    write_copy = StepCopier._write

    def slow_copy(copier: StepCopier, *arguments: Any) -> int:
        _pause(faults, "copy")
        return write_copy(copier, *arguments)

    into_cache, read = CacheFolder.copy, os.pread

    def slow_into_cache(folder: CacheFolder, *arguments: Any) -> Any:
        _pause(faults, "cache")
        return into_cache(folder, *arguments)

    def failing_read(file: int, num_bytes: int, offset: int) -> bytes:
        is_leaf = num_bytes >= _LEAF_BYTES  # a header can be read
        if is_leaf and (faults / "cache.eio").exists() and "cache" in os.readlink(f"/proc/self/fd/{file}"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(file, num_bytes, offset)

    CacheFolder.copy = slow_into_cache  # type: ignore[method-assign]
    os.pread = failing_read
    slot_cache._STALL_TIMEOUT_S = 0.5
    if (faults / "cache.impatient").exists():
        slot_cache._ADOPTION_TIMEOUT_S = 0.5
    StepCopier._write = slow_copy  # type: ignore[method-assign]
    audit.WINDOW_BYTES, audit._hashes = 64 << 10, slow_hashes
    _native.write_file = write_file
    LocalStore.remove = slow_remove  # type: ignore[method-assign]
    Queue._failed = failed_for_long  # type: ignore[method-assign]


if __name__ == "__main__":
    harm(Path(sys.argv[3]))
    run(sys.argv[1], sys.argv[2])
