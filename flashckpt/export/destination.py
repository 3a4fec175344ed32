"""A new file or folder, whole or not at all. Owns the temporary name and the rename."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator

from flashckpt.errors import OptionError

_EXPORTED = re.compile(r"rank-\d{5}\.[a-z]+")


def rank_file(rank: int, suffix: str) -> str:
    """The name of a rank's file in the folder that several ranks give."""
    return f"rank-{rank:05d}.{suffix}"


def check_free(out: str, run: str, *, force: bool) -> None:
    """OptionError where `out` is there already and must not be replaced, or its folder is not there, or it
    is the run, in it or above it. A folder is replaced only where it holds nothing but an earlier export."""
    if os.path.lexists(out) and not force:
        raise OptionError(f"{out} is there already. Nothing was written. Name another file, or give --force.")
    folder = os.path.dirname(os.path.abspath(out))
    if not os.path.isdir(folder):
        raise OptionError(f"{folder} is no folder. Nothing was written. Make it first.")
    ours, theirs = os.path.realpath(run), os.path.realpath(out)
    if os.path.commonpath([ours, theirs]) in (ours, theirs):
        raise OptionError(
            f"{out} is the run {run}, in it or above it. Nothing was written or deleted. Name another file."
        )
    if not _is_replaceable(out):
        raise OptionError(
            f"{out} is a folder and holds more than an earlier export. Nothing was written or deleted. "
            "Name a file in it, or another folder."
        )


def _is_replaceable(out: str) -> bool:
    if os.path.islink(out) or not os.path.isdir(out):
        return True
    with os.scandir(out) as found:
        return all(_EXPORTED.fullmatch(each.name) and each.is_file(follow_symlinks=False) for each in found)


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
        # A link never replaces what somebody else has put there meanwhile.
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
    if not os.path.isdir(path):
        return [path]
    return [*(os.path.join(path, name) for name in os.listdir(path)), path]


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
