"""How often a resume asks storage for the same thing, before it takes an older step or gives up.

Owns which answers may be others the next time. What follows from the last one its caller knows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from flashckpt.errors import DamagedError, RunError
from flashckpt.restore.step_image import UnreadableShardError

log = logging.getLogger(__name__)

_Found = TypeVar("_Found")
_PAUSES_S = (0.1, 0.5, 2.0)
"""Before each further try of a read that failed: a server's hiccup is over by then, a dead disk is not."""
TRIES = 1 + len(_PAUSES_S)


def patiently(read: Callable[[], _Found], what: str, url: str, run: str, *, over_line: bool) -> _Found:
    """What `read` gives of a store. A failure of storage is tried again; RunError when it does not end,
    unless it is one shard's alone: UnreadableShardError. What is not as it was written is read once more
    where it comes `over_line`: that may have spoiled it, and an older step is another branch. `run`: the URL
    of the run's own store, for whoever wants an older step."""
    for pause_s in _PAUSES_S:
        try:
            return read()
        except FileNotFoundError:
            raise
        except DamagedError as error:
            if not over_line:
                raise
            over_line = False
            log.warning("%s: %s is not as it was written (%s); reading it once more", url, what, error)
        except OSError as error:
            log.warning("%s: %s cannot be read (%s); trying again", url, what, error)
            time.sleep(pause_s)
    try:
        return read()
    except (FileNotFoundError, UnreadableShardError):
        raise
    except OSError as error:
        raise RunError(
            f"{url}: {what} cannot be read ({error}), in {TRIES} tries. Nothing was loaded, nothing was "
            "changed and nothing was marked: the files may be whole. Start again when the storage answers; "
            f"to go on from an older step instead, say so with `flashckpt branch {run} STEP`.",
            path=run,
        ) from error
