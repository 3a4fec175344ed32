"""A new run whose only step holds what was imported.

Owns the order: the source is read and named first, then attempt, shard, part and manifest are written, and
run.json last. A folder without it is refused by every command and by training, so that an import that was
killed is neither a checkpoint nor the place of a fresh run. Tensors are read one at a time.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import torch

from flashckpt import crashpoints
from flashckpt.commit import attempts, steps
from flashckpt.commit.holder import here
from flashckpt.errors import FlashckptError, RunError
from flashckpt.format.checked_json import strict_loads
from flashckpt.format.layout import Layout
from flashckpt.format.names import (
    ATTEMPTS,
    RUN,
    STEPS,
    AttemptName,
    shard_name,
    step_attempt_folder,
)
from flashckpt.format.parts import CHUNK_BYTES
from flashckpt.format.records import Part, RankRecord, Run, ShardRecord
from flashckpt.format.typed import encode_json
from flashckpt.importing.parts import Content, Mapped, content_of
from flashckpt.importing.source import SourceTensor, damaged, open_source
from flashckpt.state.tensors import DTYPE_NAMES, bits
from flashckpt.store import open_store
from flashckpt.store.base import Store
from flashckpt.store.image_sums import ImageSums

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """What was written. `parts`: name, tensors and bytes of each; `skipped` says of each item that could not
    be read why; `left_out` are keys of the source that were not chosen."""

    source: str
    format: str
    run: str
    step: int
    attempt: AttemptName
    parts: tuple[tuple[str, int, int], ...]
    skipped: tuple[str, ...]
    left_out: tuple[str, ...]


def import_checkpoint(
    path: str | os.PathLike[str],
    run: str | os.PathLike[str],
    mapped: Mapped | None = None,
    *,
    progress: Progress = lambda done, total: None,
) -> Imported:
    """Write the checkpoint in `path` as the first step of a new run.

    Raises OptionError (an unknown source, a key that is not there, an item that cannot be read), DamagedError
    (a source that is damaged or hostile), RunError where the place of the run is not free, OSError. Then
    there is no run.
    """
    store = open_store(run)
    _check_free(store)
    source = open_source(path)
    content = content_of(source, mapped or Mapped())
    attempt = _write(store, content, progress, source.path)
    return Imported(
        source=source.path,
        format=source.kind,
        run=store.url,
        step=content.step,
        attempt=attempt,
        parts=tuple(content.parts),
        skipped=tuple(content.skipped),
        left_out=tuple(content.left_out),
    )


def _check_free(store: Store) -> None:
    if store.exists(RUN):
        raise RunError(
            f"{store.url} is a run already. Nothing was written. Import into another folder.", path=store.url
        )
    if store.list(STEPS) or store.list(ATTEMPTS):
        raise RunError(
            f"{store.url} holds steps or attempts and no {RUN}: an import into it was interrupted or still "
            "runs. Nothing was written. Remove the folder if no import runs, or import into another one.",
            path=store.url,
        )


def _write(store: Store, content: Content, progress: Progress, source: str) -> AttemptName:
    attempts.check_place(store)
    attempt = attempts.claim(store, here(), lambda: _check_free(store))
    try:
        attempts.start(store, attempt, None, 0, 1)
        crashpoints.point("import.begun")
        part = Part(
            step=content.step,
            attempt=attempt,
            world=1,
            keeper=0,
            ranks=(_write_shard(store, attempt, content, progress, source),),
        )
        crashpoints.point("import.written")
        steps.publish_part(store, part)
        steps.commit(store, content.step, attempt, 1)
        attempts.mark_ended(store, attempt, "closed")
        crashpoints.point("import.committed")
    except BaseException:
        _give_up(store)
        raise
    # What follows has no way back: the run may be there, and trained on.
    if not store.create(RUN, Run(run_id=secrets.token_hex(8)).to_bytes()):
        raise RunError(
            f"{store.url} has become a run of another process meanwhile, and has a step of this import in "
            "it. Nothing was removed. Import into another folder.",
            path=store.url,
        )
    return attempt


def _give_up(store: Store) -> None:
    """Remove the rest of an import that failed. What another process has made a run stays."""
    with suppress(OSError, FlashckptError):
        if not store.exists(RUN):
            for folder in (STEPS, ATTEMPTS):
                store.remove_tree(folder)
                store.remove(folder)


def _write_shard(
    store: Store, attempt: AttemptName, content: Content, progress: Progress, source: str
) -> RankRecord:
    tensors = {leaf.name: tensor for leaf, tensor in content.leaves}
    layout = Layout.of(leaf for leaf, _ in content.leaves)
    name = shard_name(0, secrets.token_hex(6))
    sums = ImageSums(layout, CHUNK_BYTES)
    chunks = _chunks(_pieces(layout, tensors, source), sums, layout.num_bytes, progress)
    store.write_parts(f"{step_attempt_folder(content.step, attempt)}/{name}", chunks, layout.num_bytes)
    return RankRecord(
        rank=0,
        shard=ShardRecord.of(name, layout, sums.checksums()),
        leaves=layout.leaves,
        digests=tuple(sums.digests()),
        values=strict_loads(encode_json(content.values), what="values"),
    )


def _pieces(layout: Layout, tensors: dict[str, SourceTensor], source: str) -> Iterator[memoryview]:
    """The bytes of the image: its header, and each tensor, of which one is in memory at a time."""
    yield memoryview(layout.header)
    for leaf in layout.leaves:
        tensor = tensors[leaf.name].read()
        if tuple(tensor.shape) != leaf.shape or DTYPE_NAMES.get(tensor.dtype) != leaf.dtype:
            raise damaged(source, f"{leaf.name} has changed while it was read")
        if tensor.numel():
            data = bits(tensor).contiguous().reshape(-1).view(torch.uint8)
            yield memoryview(data.numpy())  # type: ignore[arg-type]


def _chunks(pieces: Iterator[memoryview], sums: ImageSums, total: int, progress: Progress) -> Iterator[bytes]:
    """The same in chunks, of which the sums are taken."""
    buffer, done = bytearray(), 0
    for piece in pieces:
        while piece:
            taken = piece[: CHUNK_BYTES - len(buffer)]
            buffer += taken
            piece = piece[len(taken) :]
            if len(buffer) == CHUNK_BYTES or done + len(buffer) == total:
                chunk = bytes(buffer)
                sums.add(done, memoryview(chunk))
                done += len(chunk)
                yield chunk
                buffer.clear()
                progress(done, total)
