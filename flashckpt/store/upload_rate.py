"""A ceiling for what a node sends to a store. Owns the option's name and when the next bytes may go."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from flashckpt.errors import OptionError

OPTION = "max_upload_bytes_per_s"
_LEAST = 1 << 20


class UploadRate:
    """So many bytes a second, on the average since the first; 0 sets no ceiling. For any threads.

    OptionError for what is no such number: with less than 1 MiB a second one part alone would take so long
    that its write looks stuck.
    """

    def __init__(
        self,
        bytes_per_s: object = 0,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if type(bytes_per_s) is not int or (bytes_per_s and bytes_per_s < _LEAST):
            raise OptionError(
                f"{OPTION}={bytes_per_s!r}: a number of bytes a second, at least {_LEAST} (1 MiB), or 0 for "
                "no ceiling. Nothing was changed."
            )
        self._bytes_per_s, self._clock, self._sleep = bytes_per_s, clock, sleep
        self._free_at, self._lock = 0.0, threading.Lock()

    def wait_for(self, num_bytes: int) -> None:
        """Return once so many bytes may be sent; they count as sent."""
        if (pause := self._taken(num_bytes)) > 0:
            self._sleep(pause)

    def count(self, num_bytes: int) -> None:
        """So many are sent at once, since others wait for them; what comes next waits for them, too."""
        self._taken(num_bytes)

    def _taken(self, num_bytes: int) -> float:
        if not self._bytes_per_s:
            return 0.0
        with self._lock:
            now = self._clock()
            begin = max(now, self._free_at)
            self._free_at = begin + num_bytes / self._bytes_per_s
            return begin - now
