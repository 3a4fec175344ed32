"""The export of a step. Owns the order: choose, read and verify while writing beside the destination, rename.
Owns the temporary name, and the list of an exported folder's files.

Writes a file or folder of whole tensors, assembled from the ranks' pieces, or a folder with a file for each
rank.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from flashckpt.commit.lineage import read_whole
from flashckpt.commit.steps import StepRecord
from flashckpt.commit.view import open_run
from flashckpt.errors import OptionError
from flashckpt.export.formats import (
    Progress,
    Selected,
    dtype_name,
    only_module,
    select,
    select_rank,
    write_dcp,
    write_safetensors,
    write_sharded,
    write_torch,
)
from flashckpt.format.names import AttemptName, SnapshotId
from flashckpt.options import size_of, user_path
from flashckpt.store.base import Store

Writer = Callable[[str, Selected], None]
"""Writes a file or a folder at a path that does not exist yet."""

_WRITERS: dict[str, Writer] = {"safetensors": write_safetensors, "torch": write_torch, "dcp": write_dcp}
_SUFFIXES = {"safetensors": "safetensors", "torch": "pt"}
"""Of formats that are one file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """The result of an export. `files`: paths (relative to `out` if it is a folder) with their bytes."""

    run: str
    step: int
    attempt: AttemptName
    out: str
    format: str
    leaves: int
    files: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """An export, except for its writer. one_module: export one module; if `only` is empty, the only one of
    the state. by_rank: a file for each rank, with slices and names as stored. is_folder: a folder is made."""

    out: str
    format: str
    step: int | None = None
    at: AttemptName | SnapshotId | None = None
    only: tuple[str, ...] = ()
    dtype: str | None = None
    one_module: bool = False
    by_rank: bool = False
    is_folder: bool = False
    force: bool = False
    progress: Progress = lambda done, total: None

    def __post_init__(self) -> None:
        object.__setattr__(self, "out", user_path(self.out))


def export(
    store: Store,
    out: str,
    *,
    format: str = "safetensors",
    step: int | None = None,
    at: AttemptName | SnapshotId | None = None,
    only: Sequence[str] = (),
    dtype: object | None = None,
    max_shard_size: int | str | None = None,
    by_rank: bool = False,
    force: bool = False,
    progress: Progress = lambda done, total: None,
) -> Exported:
    """Write the tensors of a committed step (by default, the step that a resume takes) to `out`.

    format: "safetensors", "torch" (a file for torch.load) or "dcp" (a folder for torch's DCP); for "hf" see
    flashckpt.transformers.export. only: names of parts of the state, or of leaves; if it is one module, names
    are those of its state_dict. Buffers that are not persistent are left out. dtype: of floating-point
    tensors in the export. max_shard_size: bytes, or text ("5GB", "2GiB"): write a folder of safetensors files
    of at most this size, with an index.

    Tensors of several ranks are assembled; for tensors that differ between ranks (buffers, counters), rank
    0's are taken. by_rank: write a folder with a file for each rank instead, with slices and names as stored.

    Raises OptionError for options that cannot be combined, if `out` exists without `force`, if it is a folder
    with other files than those of an earlier export, or if it is the run, inside it or above it. Raises
    MismatchError if the slices of a tensor do not cover it; NoSuchStepError, DamagedError. After an error no
    new file remains, and an existing `out` is unchanged.
    """
    most_bytes = None if max_shard_size is None else size_of(max_shard_size)
    if max_shard_size is not None and most_bytes is None:
        wrong = f"max_shard_size={max_shard_size!r}"
        raise OptionError(f"{wrong}: a size like 5GB or 500MiB. Nothing was written.")
    is_whole = not by_rank and most_bytes is None
    if format not in (_WRITERS if is_whole else _SUFFIXES):
        names = ", ".join(_WRITERS)
        why = "safetensors, torch with --by-rank or --max-shard-size" if format == "dcp" else names
        raise OptionError(f"format={format!r} is not supported. Nothing was written. Give one of {why}.")
    if most_bytes is not None and (format != "safetensors" or by_rank):
        raise OptionError(
            "max_shard_size= is for whole tensors in safetensors files and for format='hf'. Nothing was "
            "written."
        )
    write: Writer = _WRITERS[format] if most_bytes is None else partial(write_sharded, most_bytes=most_bytes)
    request = Request(
        out=out,
        format=format,
        step=step,
        at=at,
        only=tuple(only),
        dtype=None if dtype is None else dtype_name(dtype),
        by_rank=by_rank,
        is_folder=format == "dcp" or not is_whole,
        force=force,
        progress=progress,
    )
    return export_with(store, write, request)


def export_with(store: Store, write: Writer, request: Request) -> Exported:
    """Export with a writer. Raises the errors of `export` and of the writer, after which no new file
    remains."""
    open_run(store, create=False)
    check_free(request.out, store.url, force=request.force, is_folder=request.is_folder)
    return read_whole(store, request.step, request.at, read=lambda record: _exported(record, write, request))


def _exported(record: StepRecord, write: Writer, request: Request) -> Exported:
    chosen = _chosen(record, request)
    with put_in_place(request.out, force=request.force) as temporary:
        if len(chosen) == 1:
            write(temporary, chosen[0])
        else:
            os.mkdir(temporary)
            for each in chosen:
                name = f"rank-{each.rank:05d}.{_SUFFIXES[request.format]}"
                write(os.path.join(temporary, name), each)
        files = _list_files(temporary)
        if os.path.isdir(temporary):
            table = {
                "run": record.store.url,
                "step": record.step,
                "attempt": str(record.attempt),
                "format": request.format,
                "files": dict(files),
            }
            with open(os.path.join(temporary, LIST), "x", encoding="utf-8") as file:
                file.write(json.dumps(table, indent=2) + "\n")
        else:
            files = [(os.path.basename(request.out), size) for _, size in files]
    return Exported(
        run=record.store.url,
        step=record.step,
        attempt=record.attempt,
        out=request.out,
        format=request.format,
        files=tuple(files),
        leaves=sum(len(each.leaves) for each in chosen),
    )


def _chosen(record: StepRecord, request: Request) -> list[Selected]:
    if request.by_rank:
        ranks = range(record.world)
        rows = [(rank, select_rank(record, rank, request.only, request.dtype)) for rank in ranks]
    else:
        only = request.only
        if request.one_module:
            only = (only_module(record, only, request.format),)
        rows = [(0, select(record, only, request.dtype))]
    folder = os.path.dirname(request.out)
    return [Selected(record, leaves, rank, folder, request.progress) for rank, leaves in rows]


# The destination: creation in one rename, and the list of a folder's files


# Lists the origin and the files of an exported folder. An export replaces only a folder without other files.
LIST = "flashckpt-export.json"
_MAX_LIST_BYTES = 16 << 20


def check_free(out: str, run: str, *, force: bool, is_folder: bool) -> None:
    """Raise OptionError if `out` exists and must not be replaced, if its parent is not a folder, or if it is
    the run, inside it or above it. An export to a folder may replace an empty folder. With `force` it may
    also replace a folder that has only files of an earlier export."""
    folder = os.path.dirname(os.path.abspath(out))
    if not os.path.isdir(folder):
        raise OptionError(f"{folder} is not a folder. Nothing was written. Make it first.")
    run_path, out_path = os.path.realpath(run), os.path.realpath(out)
    if os.path.commonpath([run_path, out_path]) in (run_path, out_path):
        raise OptionError(
            f"{out} is the run {run}, inside it or above it. Nothing was written or deleted. Name another "
            "file."
        )
    if os.path.lexists(out) and not force and not (is_folder and _is_empty(out)):
        raise OptionError(
            f"{out} exists already{' and is not empty' if is_folder else ''}. Nothing was written. Name "
            "another one, or give --force."
        )
    if not _is_replaceable(out):
        raise OptionError(
            f"{out} is a folder and holds more than an earlier export. Nothing was written or deleted. "
            "Name a file in it, or another folder."
        )


def _list_files(path: str) -> list[tuple[str, int]]:
    """List a file, or the files below a folder, as (path in it, bytes)."""
    files = [each for each in _files(path) if not os.path.isdir(each)]
    return sorted((os.path.relpath(each, path), os.path.getsize(each)) for each in files)


def _is_empty(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path) and not os.listdir(path)


def _is_replaceable(out: str) -> bool:
    if os.path.islink(out) or not os.path.isdir(out) or _is_empty(out):
        return True
    try:
        with open(os.path.join(out, LIST), encoding="utf-8") as file:
            listed = json.loads(file.read(_MAX_LIST_BYTES))["files"]
        found = {name for name, _ in _list_files(out)}
        return isinstance(listed, dict) and found <= {LIST, *listed}
    except (OSError, ValueError, LookupError, TypeError):
        return False


@contextlib.contextmanager
def put_in_place(out: str, *, force: bool) -> Iterator[str]:
    """Yield a temporary path beside `out`, for a file or a folder. When the block succeeds, rename it to
    `out`, durably. With `force`, this replaces an existing `out`."""
    out = os.path.abspath(out)
    temporary = os.path.join(os.path.dirname(out), f".{os.path.basename(out)}.{secrets.token_hex(8)}.tmp")
    try:
        yield temporary
        for path in _files(temporary):
            _sync(path)
        _rename(temporary, out, force=force)
        # A power failure must not lose the name after the command has reported success.
        _sync(os.path.dirname(out))
    finally:
        _remove(temporary)


def _rename(temporary: str, out: str, *, force: bool) -> None:
    if force:
        if os.path.isdir(temporary) or (os.path.isdir(out) and not os.path.islink(out)):
            _exchange(temporary, out)
        else:
            os.replace(temporary, out)
        return
    try:
        # A link never replaces a file, and a rename of a folder only an empty one, that another process made.
        put = os.rename if os.path.isdir(temporary) else os.link
        put(temporary, out)
    except OSError as error:
        has_no_links = error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
        is_taken = error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)
        if is_taken or (has_no_links and os.path.lexists(out)):
            raise OptionError(
                f"{out} exists already. Nothing was written. Name another one, or give --force."
            ) from error
        if not has_no_links:
            raise
        os.rename(temporary, out)


def _exchange(temporary: str, out: str) -> None:
    """Replace `out` if one of the two is a folder, which a rename cannot do. Remove the old `out` last, and
    restore it if the rename fails."""
    if not _is_replaceable(out):
        raise OptionError(
            f"{out} has got files since that are not of an earlier export. Nothing was written or deleted. "
            "Name another folder."
        )
    before = f"{temporary.removesuffix('.tmp')}.before"
    with contextlib.suppress(FileNotFoundError):
        os.rename(out, before)
    try:
        os.rename(temporary, out)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.rename(before, out)
        raise
    _remove(before)


def _files(path: str) -> list[str]:
    """Paths to sync: each file, then each folder, the outermost last."""
    if not os.path.isdir(path):
        return [path]
    found = []
    for root, _, names in os.walk(path, topdown=False):
        found += [os.path.join(root, name) for name in names]
        found.append(root)
    return found


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
        return
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
