"""NVRx on several ranks: the adapter of one process, which has a file for each rank."""

from __future__ import annotations

from benchmarks.peers import nvrx_async


class AsyncCheckpoint(nvrx_async.AsyncCheckpoint):
    pass
