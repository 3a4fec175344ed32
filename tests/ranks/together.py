"""Several ranks in this process, a thread each, that meet over a real store."""

import threading
from collections.abc import Callable, Iterable
from typing import Any

from torch.distributed import TCPStore

from flashckpt.ranks.job import Job

HOST, LIMIT_S = "127.0.0.1", 60.0


def each_rank(
    world: int, operation: Callable[[Job], Any], *, timeout_s: float = LIMIT_S, absent: tuple[int, ...] = ()
) -> list[Any]:
    """What the operation gives on each rank, or its error there; None for those that are absent."""
    served = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    found: list[Any] = [None] * world

    def connect() -> Any:
        return TCPStore(HOST, served.port, is_master=False)

    def run(rank: int) -> None:
        store: Any = served if rank == 0 else connect()
        try:
            found[rank] = operation(Job(rank, world, store, timeout_s, connect))
        except Exception as error:
            found[rank] = error

    on_threads(run, [rank for rank in range(world) if rank not in absent])
    return found


def on_threads(run: Callable[[int], None], ranks: Iterable[int]) -> None:
    """Run a rank each, all at once; fails where one has not ended in time."""
    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive(), "a rank hangs"
