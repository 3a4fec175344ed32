"""Copying of checkpoints to a mirror: a second store of the run, with a catalogue of its own.

What holds for a home holds for a mirror. A session that copies is its writer: it copies into a folder of its
own, and commits in ascending order, so deletion is as safe there. Each checkpoint has a session. A session
that was superseded gives up its checkpoint, and the copier goes on with the next checkpoint. If it tried the
same checkpoint again, two copiers could supersede each other for ever.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from flashckpt.catalogue.changes import Keep, bases
from flashckpt.catalogue.home import Home
from flashckpt.catalogue.requests import Copy, Files, Read, Steps
from flashckpt.errors import DamagedError
from flashckpt.format.catalogue import FROZEN_PREFIX, Catalogue, Checkpoint, Folder
from flashckpt.format.manifest import FrozenFile, Manifest

log = logging.getLogger(__name__)


def copy_checkpoint(
    home: Home, source: Catalogue, checkpoint: Checkpoint, mirror: Home, nonce: str, keep: Keep
) -> Steps[Catalogue | None]:
    """Copy a checkpoint in a new session. Returns a version of the mirror. It has the checkpoint unless
    another session has committed a newer one. Returns None if retention has removed the checkpoint from the
    home. SupersededError if another copier came, or another job uses the mirror as its home. DamagedError if
    the manifest at the home is damaged."""
    there = yield from mirror.newest()
    if there.has(checkpoint.id):
        return there
    target = yield from mirror.follow(nonce, source)
    if target.has(checkpoint.id):
        return target
    manifest = yield Read(home.store, checkpoint.manifest_path, Manifest)
    if manifest is None:
        return None
    folder = Folder(target.writer, checkpoint.id)
    known = (yield from _frozen_files(mirror, target)) if manifest.frozen else {}
    frozen = []
    for each in manifest.frozen:
        there_already = known.get(each.name)
        if there_already is None or there_already.num_bytes != each.num_bytes:
            if not (yield _copy(home, mirror, each.base, folder, each.name, each.num_bytes)):
                return None
            known[each.name] = FrozenFile(folder, each.name, each.num_bytes)
        frozen.append(known[each.name])
    for name, num_bytes in [(each.name, each.num_bytes) for each in (*manifest.parts, *manifest.shards)]:
        if not (yield _copy(home, mirror, manifest.folder, folder, name, num_bytes)):
            return None
    made = replace(manifest, folder=folder, frozen=tuple(sorted(frozen)))
    committed = yield from mirror.publish(target, made)
    target = yield from mirror.commit(target, target.writer, committed, keep)
    try:
        yield from mirror.collect(target)
        yield from mirror.trim(target)
    except (OSError, DamagedError) as error:
        # The checkpoint is committed, and the next copy deletes the rest.
        log.warning("files of expired steps in the mirror could not be deleted: %s", error)
    return target


def _copy(home: Home, mirror: Home, source: Folder, target: Folder, name: str, num_bytes: int) -> Copy:
    return Copy(home.store, f"{source.path}/{name}", mirror.store, f"{target.path}/{name}", num_bytes)


def _frozen_files(mirror: Home, target: Catalogue) -> Steps[dict[str, FrozenFile]]:
    """The frozen files that checkpoints of a mirror have, by name, and that are there. Names are unique in a
    run."""
    found: dict[str, FrozenFile] = {}
    for base in sorted(bases(target)):
        names: dict[str, int] = yield Files(mirror.store, base.path)
        frozen = ((name, size) for name, size in names.items() if name.startswith(FROZEN_PREFIX))
        found |= {name: FrozenFile(base, name, size) for name, size in frozen}
    return found
