"""Copying of checkpoints to a mirror: a second store of the run, with a catalogue of its own.

What holds for a home holds for a mirror. A session that copies is its writer: it copies into a folder of its
own, and commits in ascending order, so deletion is as safe there. Each checkpoint has a session. One that was
superseded gives its checkpoint up, and the copier goes on with the next one: with the same one, two copiers
could supersede each other for ever.
"""

from __future__ import annotations

from dataclasses import replace

from flashckpt.catalogue.changes import Keep
from flashckpt.catalogue.home import Home
from flashckpt.catalogue.requests import Copy, Read, Steps
from flashckpt.errors import DamagedError
from flashckpt.format.catalogue import Catalogue, Checkpoint, Folder
from flashckpt.format.manifest import FrozenFile, Manifest


def copy_checkpoint(
    home: Home, source: Catalogue, checkpoint: Checkpoint, mirror: Home, nonce: str, keep: Keep
) -> Steps[Catalogue | None]:
    """Copy a checkpoint in a new session. Returns a version of the mirror, which has it unless it was
    overtaken there; None if retention at the home has removed it meanwhile. SupersededError if another copier
    came, or another job uses the mirror as its home. DamagedError if its manifest is."""
    target = yield from mirror.follow(nonce, source)
    if target.has(checkpoint.id):
        return target
    manifest = yield Read(home.store, checkpoint.manifest_path, Manifest)
    if manifest is None:
        return None
    folder = Folder(target.writer, checkpoint.id)
    there = (yield from _frozen_files(mirror, target)) if manifest.frozen else {}
    frozen = []
    for each in manifest.frozen:
        if each.name not in there:
            if not (yield _copy(home, mirror, each.base, folder, each.name, each.num_bytes)):
                return None
            there[each.name] = FrozenFile(folder, each.name, each.num_bytes)
        frozen.append(there[each.name])
    for name, num_bytes in manifest.files()[manifest.folder].items():
        is_frozen = any((manifest.folder, name) == (each.base, each.name) for each in manifest.frozen)
        if not is_frozen and not (yield _copy(home, mirror, manifest.folder, folder, name, num_bytes)):
            return None
    made = replace(manifest, folder=folder, frozen=tuple(sorted(frozen)))
    committed = yield from mirror.publish(target, nonce, made)
    target, _ = yield from mirror.commit(target, target.writer, committed, keep)
    yield from mirror.collect(target)
    return target


def _copy(home: Home, mirror: Home, source: Folder, target: Folder, name: str, num_bytes: int) -> Copy:
    return Copy(home.store, f"{source.path}/{name}", mirror.store, f"{target.path}/{name}", num_bytes)


def _frozen_files(mirror: Home, target: Catalogue) -> Steps[dict[str, FrozenFile]]:
    """The frozen files that checkpoints of a mirror have, by name. Names are unique in a run."""
    found = {}
    for checkpoint in target.checkpoints:
        if checkpoint.bases:
            try:
                manifest = yield Read(mirror.store, checkpoint.manifest_path, Manifest)
            except DamagedError:
                continue
            found.update({each.name: each for each in (manifest.frozen if manifest else ())})
    return found
