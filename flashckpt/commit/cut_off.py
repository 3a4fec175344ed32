"""Small files whose writer was killed before they had their names: which those are, and their end.

Owns how long one may still be written, by which clock. Steps and attempts take what is in their folders
along; this is for what stands elsewhere, and where they stay.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import suppress

from flashckpt.format.names import ATTEMPT, ATTEMPTS, CLAIM, STEP, STEPS
from flashckpt.store.base import Entry, Store

_TEMPORARY = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{16}\.tmp")
# What `attach` creates to see whether it may, and whether a store overwrites.
_PROBE = re.compile(r"\.?probe-[0-9a-f]{16}")
_SAFE_AGE_S = 86400.0
"""No file is written for longer."""
# In the folders of all attempts and all steps: foreign folders in them are not scanned.
_OURS = re.compile("|".join(each.pattern for each in (STEP, ATTEMPT, CLAIM, _TEMPORARY)))


def final_name(entry: Entry) -> str:
    """The name that a temporary file was to have, empty for any other file."""
    match = None if entry.is_folder else _TEMPORARY.fullmatch(entry.name)
    return match["name"] if match else ""


def cut_off(store: Store) -> Iterator[tuple[str, Entry]]:
    """The paths of those that are a day old, in any folder of a run. Where there are no renames a file has
    its name at once, and probes alone can be left."""
    found, newest_s = dict[str, Entry](), 0.0
    for folder in _folders(store):
        for entry in store.list(folder, _OURS if folder in (ATTEMPTS, STEPS) else None):
            newest_s = max(newest_s, entry.since_s)
            if final_name(entry) or (not folder and _PROBE.fullmatch(entry.name)):
                found[f"{folder}/{entry.name}" if folder else entry.name] = entry
    # The store's clock may be days behind this one: then what it has just written seems old.
    now_s = min(time.time(), newest_s)
    for path, entry in found.items():
        # By its name: who buries an old manifest has just given it this one.
        if entry.since_s and now_s - entry.since_s > _SAFE_AGE_S:
            yield path, entry


def remove_cut_off(store: Store) -> None:
    """Remove them, as far as that can be: each is a few bytes."""
    with suppress(OSError):
        store.remove_files([path for path, _ in cut_off(store)])


def _folders(store: Store) -> Iterator[str]:
    yield ""
    if not store.capabilities.rename:
        yield ATTEMPTS  # for the claims' times
        return
    for top in (ATTEMPTS, STEPS):
        yield top
        for each in store.list(top, _OURS):
            if each.is_folder:
                yield f"{top}/{each.name}"
                inner = store.list(f"{top}/{each.name}") if top == STEPS else []
                yield from (f"{top}/{each.name}/{of.name}" for of in inner if of.is_folder)
