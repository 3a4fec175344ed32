"""Whether one file is the one that its record describes: reads every byte of it."""

from __future__ import annotations

from typing import Literal

from flashckpt.errors import DamagedError
from flashckpt.format.records import Contents
from flashckpt.store.base import LengthError, Store
from flashckpt.store.read_plan import read_shard

FileStatus = Literal["ok", "missing", "truncated", "damaged", "unreadable"]

_SHOWN = 8


def verify_file(
    store: Store,
    path: str,
    contents: Contents,
    into: memoryview | None = None,
    *,
    threads: int = 2,
    progress_word: int = 0,
) -> tuple[FileStatus, str]:
    """Compare one shard or frozen file with its record. Returns its status, and what is wrong. `into`:
    the memory that it is read into; its bytes are the compared ones."""
    try:
        found = read_shard(store, path, contents, into, threads=threads, progress=progress_word)
    except FileNotFoundError:
        return "missing", "there is no such file"
    except LengthError as error:
        return "truncated", str(error)
    except DamagedError as error:
        return "damaged", str(error)
    except OSError as error:
        # The bytes may be right.
        return "unreadable", str(error)
    wrong = found.wrong_leaves(contents)
    if found.bad_chunks or wrong:
        return "damaged", _words(found.bad_chunks, wrong)
    if found.header != contents.layout().header:
        return "damaged", "its header is not the one that its part describes"
    return "ok", ""


def _words(bad_chunks: list[int], leaves: list[str]) -> str:
    words = []
    if bad_chunks:
        chunks = ", ".join(map(str, bad_chunks[:_SHOWN])) + (" …" if len(bad_chunks) > _SHOWN else "")
        words.append(f"chunk {chunks} does not have its checksum")
    if leaves:
        names = ", ".join(leaves[:_SHOWN]) + (" …" if len(leaves) > _SHOWN else "")
        words.append(f"not the bytes that were captured: {names}")
    return "; ".join(words)
