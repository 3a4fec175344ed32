"""torch.distributed.checkpoint: `save`, `async_save` as it comes, and `async_save` with a stager that is
kept from save to save (pinned and asynchronous where there is CUDA, without which the stager refuses both).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from benchmarks.peers.base import Saver, join_alone
from benchmarks.workload import Workload

_WRITER_THREADS = 4


class _Dcp(Saver):
    packages = ("torch",)

    def setup(self, workload: Workload, folder: Path, every: int) -> None:
        super().setup(workload, folder, every)
        join_alone(workload.device.type)

    def load(self, workload: Workload, folder: Path, step: int) -> dict[str, float]:
        load(dict(workload.leaves()), checkpoint_id=folder / str(step), no_dist=True)
        workload.sync()
        return {}


class Save(_Dcp):
    def save(self, step: int) -> None:
        writer = FileSystemWriter(self.folder / str(step), thread_count=_WRITER_THREADS)
        save(self.workload.leaves(), storage_writer=writer)


class AsyncSave(_Dcp):
    def __init__(self) -> None:
        self._upload: Any = None

    def save(self, step: int) -> None:
        self.wait()
        self._upload = async_save(self.workload.leaves(), checkpoint_id=self.folder / str(step))

    def wait(self) -> None:
        # One at a time, as the documentation asks: a second save would share what the first still reads.
        if self._upload is not None:
            self._upload.result()
            self._upload = None


class AsyncSaveKeptStager(_Dcp):
    def __init__(self) -> None:
        self._stager: DefaultStager | None = None
        self._response: Any = None

    def setup(self, workload: Workload, folder: Path, every: int) -> None:
        super().setup(workload, folder, every)
        cuda = workload.device.type == "cuda"
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=cuda,
                use_shared_memory=True,
                use_async_staging=cuda,
                use_non_blocking_copy=cuda,
            )
        )

    def save(self, step: int) -> None:
        self.wait()
        self._response = async_save(
            self.workload.leaves(),
            storage_writer=FileSystemWriter(self.folder / str(step), thread_count=_WRITER_THREADS),
            async_stager=self._stager,
        )

    def gate(self) -> None:
        staging = getattr(self._response, "staging_completion", None)
        if staging is not None:
            staging.result()

    def wait(self) -> None:
        if self._response is not None:
            getattr(self._response, "upload_completion", self._response).result()
            self._response = None

    def close(self) -> None:
        if self._stager is not None:
            self._stager.close()
