"""A new file or folder that appears atomically. Owns the temporary name, the rename, and the list of an
exported folder's files."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping

from flashckpt.errors import OptionError

# In an exported folder: where it is from, and its files. Only a folder of exactly these files is replaced.
LIST = "flashckpt-export.json"
_MAX_LIST_BYTES = 16 << 20


def rank_file(rank: int, suffix: str) -> str:
    """The name of a rank's file in the folder that several ranks give."""
    return f"rank-{rank:05d}.{suffix}"


def check_free(out: str, run: str, *, force: bool, is_folder: bool) -> None:
    """Raise OptionError where `out` exists and must not be replaced, where its parent is not a folder, or
    where it is the run, inside it or above it. An empty folder is free for a folder. With `force` a folder is
    replaced only if it holds nothing but an earlier export."""
    folder = os.path.dirname(os.path.abspath(out))
    if not os.path.isdir(folder):
        raise OptionError(f"{folder} is no folder. Nothing was written. Make it first.")
    ours, theirs = os.path.realpath(run), os.path.realpath(out)
    if os.path.commonpath([ours, theirs]) in (ours, theirs):
        raise OptionError(
            f"{out} is the run {run}, in it or above it. Nothing was written or deleted. Name another file."
        )
    if os.path.lexists(out) and not force and not (is_folder and _is_empty(out)):
        raise OptionError(
            f"{out} is there already{' and is not empty' if is_folder else ''}. Nothing was written. Name "
            "another, or give --force."
        )
    if not _is_replaceable(out):
        raise OptionError(
            f"{out} is a folder and holds more than an earlier export. Nothing was written or deleted. "
            "Name a file in it, or another folder."
        )


def list_files(folder: str) -> list[tuple[str, int]]:
    """The files below a folder, by their paths in it, with their bytes; of a file its own."""
    if not os.path.isdir(folder):
        return [("", os.path.getsize(folder))]
    found = []
    for root, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(root, name)
            found.append((os.path.relpath(path, folder), os.path.getsize(path)))
    return sorted(found)


def write_list(folder: str, about: Mapping[str, object]) -> None:
    """Write the list of an exported folder, its last file."""
    table = {**about, "files": dict(list_files(folder))}
    with open(os.path.join(folder, LIST), "x", encoding="utf-8") as file:
        file.write(json.dumps(table, indent=2) + "\n")


def _is_empty(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path) and not os.listdir(path)


def _is_replaceable(out: str) -> bool:
    if os.path.islink(out) or not os.path.isdir(out) or _is_empty(out):
        return True
    try:
        with open(os.path.join(out, LIST), encoding="utf-8") as file:
            listed = json.loads(file.read(_MAX_LIST_BYTES))["files"]
        there = {name for name, _ in list_files(out)}
        return isinstance(listed, dict) and there <= {LIST, *listed}
    except (OSError, ValueError, LookupError, TypeError):
        return False


@contextlib.contextmanager
def put_in_place(out: str, *, force: bool) -> Iterator[str]:
    """A temporary path beside `out`, for a file or a folder; when the block ends well it becomes `out`,
    durably. What stands there is replaced with `force` only, and only then."""
    out = os.path.abspath(out)
    temporary = os.path.join(os.path.dirname(out), f".{os.path.basename(out)}.{secrets.token_hex(8)}.tmp")
    try:
        yield temporary
        for path in _files(temporary):
            _sync(path)
        _rename(temporary, out, force=force)
        # The name must not be lost with a power failure after the command said that it is there.
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
        # A link never replaces what another process has put there meanwhile; a folder only an empty one.
        put = os.rename if os.path.isdir(temporary) else os.link
        put(temporary, out)
    except OSError as error:
        has_no_links = error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
        is_taken = error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)
        if is_taken or (has_no_links and os.path.lexists(out)):
            raise OptionError(f"{out} is there already. Nothing was written.") from error
        if not has_no_links:
            raise
        os.rename(temporary, out)


def _exchange(temporary: str, out: str) -> None:
    """Where a rename cannot replace. What stood there goes last, and comes back where the rename fails."""
    if not _is_replaceable(out):
        raise OptionError(
            f"{out} has got other things than an earlier export in it meanwhile. Nothing of it was touched, "
            "nothing was written. Name another folder."
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
    """What must be durable: each file, then each folder, the outermost last."""
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
