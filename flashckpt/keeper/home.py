"""Where the run stands that a keeper serves: at its path, moved, or gone with another run in its place.

Owns this judgement. Whoever writes to the run asks first; what is gone may be a disk that is away, so
nothing is ever concluded from it but to wait.
"""

from __future__ import annotations

from flashckpt.commit.run import open_run
from flashckpt.errors import DamagedError, FormatError, NoSuchStepError, UnusableRunError
from flashckpt.events import log
from flashckpt.memory.runtime import identity_of
from flashckpt.store.base import Store, open_store


class Home:
    """`identity` is the name of the run on this node, that of the runtime folder. `told` is called by the
    keeper's loop, `stands` by its workers only: it reads storage."""

    def __init__(self, store: Store, identity: str) -> None:
        self._store = store
        self._identity = identity
        self._run_id: str | None = None
        self._told: str | None = None

    def told(self, path: str) -> None:
        """Who asks for this run has found it here."""
        self._told = path

    def stands(self) -> bool:
        """Whether the run is in the store; a moved one is followed there. OSError where nobody can tell."""
        if self._is_ours(self._store):
            return True
        told = self._told
        if told is None or told == self._store.url or not self._store.capabilities.rename:
            return False
        if not self._is_ours(open_store(told)):
            return False
        log.warning("the run was moved from %s to %s: it is followed there", self._store.url, told)
        self._store.move_to(told)
        return True

    def _is_ours(self, store: Store) -> bool:
        """By its id: a copy that was put in its place counts as the run, as a disk that comes back does."""
        try:
            found = open_run(store, create=False).run_id
        except (NoSuchStepError, UnusableRunError):
            return False
        except (DamagedError, FormatError):
            # Whose it is cannot be read any more, and what is in memory is worth more than a doubt.
            return True
        if self._run_id is None and identity_of(found, store.place()) == self._identity:
            self._run_id = found
        return found == self._run_id
