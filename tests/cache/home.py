"""What tests know of a run's home on a server, and of its snapshots in a cache."""

from collections import Counter
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import flashckpt
from flashckpt.errors import FlashckptError
from flashckpt.memory.cache_folder import open_cached
from flashckpt.memory.region import is_region_name
from tests.stores.proxy import Fault, Proxy, Request


@dataclass
class Home:
    """A run on an S3 server. While it is shut, nothing of a snapshot arrives there."""

    url: str
    proxy: Proxy

    def shut(self) -> None:
        """Refuse each write of data; versions, signs of life and events are written as ever."""

        def fault(request: Request) -> Fault:
            is_data = "/run/data/" in request.path
            return "refuse" if is_data and request.method in ("PUT", "POST") else ""

        self.proxy.fault = fault

    def open(self) -> None:
        self.proxy.fault = lambda request: ""

    @property
    def steps(self) -> list[int]:
        """The committed steps."""
        try:
            return flashckpt.steps(self.url)
        except flashckpt.NoSuchStepError:
            return []

    def reads_of_data(self) -> list[str]:
        """The requests so far that read bytes of a shard or of constants."""
        return [
            each.path
            for each in self.proxy.requests
            if each.method == "GET" and ("/frozen-" in each.path or "/rank-" in each.path)
        ]


def files_in(cache: Path) -> list[Path]:
    """The cached slots and constants of all runs."""
    return sorted(path for path in cache.rglob("*") if is_region_name(path.name))


def slots_in(cache: Path) -> list[Path]:
    """The cached slots, oldest snapshot first."""
    return sorted((path for path in files_in(cache) if path.name.startswith("slot-")), key=step_of)


def step_of(path: Path) -> int:
    """The step in a cached slot, -1 where its head cannot be read."""
    with suppress(FlashckptError, OSError), closing(open_cached(str(path))) as slot:
        sealed = slot.sealed()
        return -1 if sealed is None else sealed.step
    return -1


def cached_steps(cache: Path, ranks: int = 1) -> list[int]:
    """The steps that so many ranks have in a cache, oldest first. A keeper may remove files meanwhile."""
    counted = Counter(map(step_of, slots_in(cache)))
    return sorted(step for step, count in counted.items() if step >= 0 and count == ranks)
