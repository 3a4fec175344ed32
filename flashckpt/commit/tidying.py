"""Small files that nothing needs: those whose writer was killed before they had their names, ledgers and
counters of attempts that are gone. Files of snapshots and versions are deleted elsewhere; see docs/commit.md.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator, Sequence

from flashckpt.commit.view import View
from flashckpt.format.names import ALIVE, EVENTS, AttemptName, alive_path
from flashckpt.store.base import Entry, Store

log = logging.getLogger(__name__)

# Also what `attach` creates to check for the right to write.
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.tmp|\.probe-[0-9a-f]{16}")
_SAFE_AGE_S = 86400.0
"""No file is written for longer."""
# How many ledgers of older attempts stay for people to read. They are counted once in so many starts: on an
# object store the listing is a request.
_LEDGERS_KEPT = 64
_LEDGERS_COUNTED_EVERY = 16
# Objects of keepers' own ledgers: each keeper writes others.
_KEEPER_OBJECTS_KEPT = 256


def tidy(view: View, me: AttemptName) -> None:
    """Remove files that no command reads, for an attempt that is about to begin. Logs failures."""
    try:
        counters = view.store.list(ALIVE)
        paths = [path for path, _ in temporary_files(view.store, counters)]
        for each in counters:
            name = None if each.is_folder else AttemptName.parse(each.name)
            if name is not None and name != me and name < view.catalogue.attempt:
                paths.append(alive_path(name))
        view.store.remove_files(paths)
        if me.number % _LEDGERS_COUNTED_EVERY == 0:
            remove_ledgers(view)
    except OSError as error:
        log.warning("old temporary files and ledgers could not be removed: %s", error)


def temporary_files(store: Store, counters: Sequence[Entry] | None = None) -> Iterator[tuple[str, Entry]]:
    """Temporary files and probes that are a day old, with their paths. `counters`: the entries of alive/, if
    the caller has listed it. Object stores have no temporary files."""
    if not store.is_folder:
        return
    counters = store.list(ALIVE) if counters is None else counters
    there = {f"{ALIVE}/{each.name}": each for each in counters} | {each.name: each for each in store.list("")}
    # The store's clock may be days behind this one: then a new file seems old.
    now_s = min(time.time(), max((each.modified_s for each in there.values()), default=0.0))
    for path, entry in there.items():
        is_ours = _TEMPORARY.fullmatch(entry.name)
        if is_ours and not entry.is_folder and entry.modified_s and now_s - entry.modified_s > _SAFE_AGE_S:
            yield path, entry


def remove_ledgers(view: View) -> None:
    """Remove the oldest ledgers of attempts that the catalogue has forgotten."""
    known = view.attempts()
    gone: dict[AttemptName, list[str]] = {}
    keepers: list[tuple[float, str]] = []
    for entry in view.store.list(EVENTS):
        owner = entry.name.partition(".")[0]
        name = AttemptName.parse(owner)
        if name is not None and name not in known:
            gone.setdefault(name, []).append(entry.name)
        elif owner == "keeper":
            keepers.append((entry.modified_s, entry.name))
    expired = [file for name in sorted(gone)[:-_LEDGERS_KEPT] for file in gone[name]]
    expired += [file for _, file in sorted(keepers)[:-_KEEPER_OBJECTS_KEPT]]
    view.store.remove_files(f"{EVENTS}/{file}" for file in expired)
