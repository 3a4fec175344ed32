"""All ranks have called `attach`: asked of the default group's own store, before the one collective.

`if rank == 0: attach(…)`, as one saves by hand, would hang in that collective until the group's timeout, and
then end with an error that names nothing of ours. Where that store cannot be had nothing is asked.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

from flashckpt.errors import RunError

log = logging.getLogger(__name__)

# When it is said who is missing; how long they are waited for at least, and of the group's timeout.
WORD_AFTER_S, LEAST_PATIENCE_S, SHARE_OF_TIMEOUT = 30.0, 600.0, 0.5
_DEFAULT_TIMEOUT_S = 1800.0
_WAIT_S, _PAUSE_S = 1.0, 0.2
_MOST_NAMED = 8
# Each call has keys of its own, as long as all ranks call alike. One in which not all came does not count.
_calls = 0


class Store(Protocol):
    """What is used of a `torch.distributed.Store`."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...


def arrive(distributed: Any, rank: int, world: int) -> None:
    """Returns once all ranks of the default group have called this. Raises RunError, on all that have, where
    some do not come."""
    global _calls
    store = _default_store(distributed)
    if store is None:
        return
    patience_s = max(LEAST_PATIENCE_S, SHARE_OF_TIMEOUT * _timeout_s(distributed))
    arrive_at(store, _calls, rank, world, patience_s)
    _calls += 1


def arrive_at(store: Store, call: int, rank: int, world: int, patience_s: float) -> None:
    """The same at a store, in the call of this number."""
    # What an earlier incarnation of the job has left in the store is nobody's answer.
    token, meeting = secrets.token_hex(8), _Meeting(store, call, world)
    store.set(meeting.keys[rank], token)
    began_s, is_said = time.monotonic(), False
    while not (meeting.all_came() if rank == 0 else meeting.is_let_go(token)):
        waited_s = time.monotonic() - began_s
        if waited_s > WORD_AFTER_S and not is_said:
            is_said = True
            log.warning("%s", _absent(meeting.absent(), waited_s))
        # Rank 0 is to find out first: it knows whom to name.
        if waited_s > patience_s * (1 + (rank > 0)):
            words = _absent(meeting.absent(), waited_s)
            if rank == 0:
                meeting.give_up(words)
            raise RunError(words)
    if rank == 0:
        meeting.let_go()


class _Meeting:
    def __init__(self, store: Store, call: int, world: int) -> None:
        self._store, self._go = store, f"flashckpt/attach/{call}/go"
        self.keys = [f"flashckpt/attach/{call}/{rank}" for rank in range(world)]

    def all_came(self) -> bool:
        return self._waited(self.keys)

    def let_go(self) -> None:
        self._store.set(self._go, json.dumps(["", []]))

    def give_up(self, words: str) -> None:
        came = [self._store.get(key).decode() for key in self.keys if self._store.check([key])]
        self._store.set(self._go, json.dumps([words, came]))

    def is_let_go(self, token: str) -> bool:
        """Raises what rank 0 has raised over this call."""
        if not self._waited([self._go]):
            return False
        words, came = json.loads(self._store.get(self._go))
        if token in came:
            raise RunError(words)
        if words:
            time.sleep(_PAUSE_S)  # of a call before
        return not words

    def absent(self) -> list[int]:
        return [rank for rank, key in enumerate(self.keys) if not self._store.check([key])]

    def _waited(self, keys: list[str]) -> bool:
        try:
            # In short waits: an interrupt is heard between them, and torch's own threads have the store.
            self._store.wait(keys, timedelta(seconds=_WAIT_S))
        except RuntimeError:  # each store has its own when time is over; one that is gone raises again
            return self._store.check(keys)
        return True


def _absent(ranks: Sequence[int], waited_s: float) -> str:
    shown = ", ".join(map(str, ranks[:_MOST_NAMED]))
    more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
    who = f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{more}" if ranks else "rank 0"
    return (
        f"flashckpt.attach (or loop) was called {waited_s:.0f} s ago, and {who} of the default process group "
        "did not call it. Nothing was started or changed. Every rank calls it, not rank 0 alone: each saves "
        "and loads what it holds. If it is called under a condition on the rank, take that away; else see "
        "what keeps the others."
    )


def _default_store(distributed: Any) -> Store | None:
    try:
        found: Store | None = distributed.distributed_c10d._get_default_store()
    except (AttributeError, RuntimeError, ValueError) as error:
        log.debug("the default group's store cannot be asked: %s", error)
        return None
    return found


def _timeout_s(distributed: Any) -> float:
    """The default group's, as far as it tells."""
    try:
        import torch

        group = distributed.distributed_c10d._get_default_group()
        kinds = [torch.device(kind) for kind in ("cpu", "cuda") if torch.device(kind) in group._device_types]
        return float(min(group._get_backend(kind).options._timeout.total_seconds() for kind in kinds))
    except (AttributeError, RuntimeError, ValueError, TypeError):
        return _DEFAULT_TIMEOUT_S
