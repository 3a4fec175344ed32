"""Copying of checkpoints to a mirror: a second store of the run, with a catalogue of its own.

What holds for a home holds for a mirror. A session that copies is its writer: it copies into a folder of its
own, and commits in ascending order, so deletion is as safe there. Each checkpoint has a session. A session
that was superseded gives up its checkpoint, and the copier goes on with the next checkpoint. If it tried the
same checkpoint again, two copiers could supersede each other for ever.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from flashckpt.catalogue.changes import bases, require_writer
from flashckpt.catalogue.home import Home
from flashckpt.catalogue.requests import Copy, Files, Read, Steps
from flashckpt.errors import DamagedError
from flashckpt.format.catalogue import Catalogue, Checkpoint, Folder
from flashckpt.format.manifest import File, FrozenFile, Manifest, PartFile, plain_name
from flashckpt.options import Keep

log = logging.getLogger(__name__)


def copy_checkpoint(
    home: Home, source: Catalogue, checkpoint: Checkpoint, mirror: Home, nonce: str, keep: Keep
) -> Steps[Catalogue | None]:
    """Copy a checkpoint in a new session. Returns a version of the mirror. It has the checkpoint unless
    another session has committed a newer one. Returns None if retention has removed the checkpoint from the
    home. SupersededError if another copier came, or another job uses the mirror as its home. DamagedError if
    the manifest at the home is damaged."""
    before = yield from mirror.newest()
    if before.has(checkpoint.id):
        return before
    target = yield from mirror.follow(nonce, source)
    if target.has(checkpoint.id):
        return target
    manifest = yield Read(home.store, checkpoint.manifest_path, Manifest)
    if manifest is None:
        return None
    try:
        copied = yield from _copied_files(home, manifest, mirror, target)
        if copied is None:
            return None
        committed = yield from mirror.publish(target, copied)
    except FileNotFoundError:
        # Another copier may have deleted the folder of this session, which it has superseded.
        require_writer((yield from mirror.newest(target)), target.writer)
        raise
    target = yield from mirror.commit(target, target.writer, committed, keep)
    try:
        yield from mirror.collect(target)
        yield from mirror.trim(target)
    except (OSError, DamagedError) as error:
        # The checkpoint is committed, and the next copy deletes the rest.
        log.warning("files of expired steps in the mirror could not be deleted: %s", error)
    return target


def _copied_files(home: Home, manifest: Manifest, mirror: Home, target: Catalogue) -> Steps[Manifest | None]:
    """Copy the files that a manifest names. Return the manifest for the mirror, None if a file is gone from
    the home."""
    folder = Folder(target.writer, manifest.folder.id)
    known = (yield from _frozen_files(mirror, target)) if manifest.frozen else {}
    frozen, shards = [], []
    for each in manifest.frozen:
        name = plain_name(each.name)
        if name not in known:
            made: File | None = yield _copy(home, mirror, each.base, folder, each)
            if made is None:
                return None
            known[name] = FrozenFile(folder, *made)
        frozen.append(known[name])
    for part in manifest.parts:
        if (yield _copy(home, mirror, manifest.folder, folder, part)) is None:
            return None
    for shard in manifest.shards:
        if (made := (yield _copy(home, mirror, manifest.folder, folder, shard))) is None:
            return None
        shards.append(made)
    return replace(manifest, folder=folder, shards=tuple(shards), frozen=tuple(sorted(frozen)))


def _copy(
    home: Home, mirror: Home, source: Folder, target: Folder, file: File | PartFile | FrozenFile
) -> Copy:
    there = f"{target.path}/{plain_name(file.name)}"
    return Copy(home.store, f"{source.path}/{file.name}", mirror.store, there, file.num_bytes)


def _frozen_files(mirror: Home, target: Catalogue) -> Steps[dict[str, FrozenFile]]:
    """The frozen files that checkpoints of a mirror name, by name, and that are there with their lengths.
    Names are unique in a run."""
    there, found = dict[Folder, dict[str, int]](), dict[str, FrozenFile]()
    for base in sorted(bases(target)):
        there[base] = yield Files(mirror.store, base.path)
    for checkpoint in target.checkpoints if there else ():
        try:
            manifest: Manifest | None = yield Read(mirror.store, checkpoint.manifest_path, Manifest)
        except DamagedError:
            continue
        for each in manifest.frozen if manifest is not None else ():
            if there.get(each.base, {}).get(each.name) == each.num_bytes:
                found[plain_name(each.name)] = each
    return found
