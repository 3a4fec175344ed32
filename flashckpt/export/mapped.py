"""The selected tensors as mapped memory, for writers that take torch tensors: anonymous memory stays bounded,
and an export appears only once every byte of it is verified."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from flashckpt.export.formats import Selected, in_file_order, write_image
from flashckpt.export.selection import StoredLeaf
from flashckpt.format.layout import Leaf
from flashckpt.restore.mapping import views_of_files
from flashckpt.restore.snapshot import leaf_view


@contextlib.contextmanager
def mapped_tensors(selected: Selected) -> Iterator[dict[str, torch.Tensor]]:
    """Every tensor under each of its names; tied names give one tensor. The run's own files are mapped where
    they hold the exported bytes, and a thread verifies them, in the order of `selected`, while the block
    writes. Otherwise the tensors are verified and written to a file without a name beside the destination,
    and that is mapped.

    Leaving the block raises DamagedError where a byte is not what was captured: what the block has written
    must not be used then. OSError where the disk is full."""
    stored = _in_files(selected)
    if stored is None:
        yield _by_name(_in_scratch_file(selected))
    else:
        with _verified(selected, [each for each, _ in stored]):
            yield _by_name([(each.leaf, tensor) for each, tensor in stored])


def _by_name(pairs: Sequence[tuple[Leaf, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: tensor for leaf, tensor in pairs for name in (leaf.name, *leaf.aliases)}


def _in_files(selected: Selected) -> list[tuple[StoredLeaf, torch.Tensor]] | None:
    """None where the files of the run do not hold these tensors as they are exported."""
    stored = [each for each in selected.leaves if isinstance(each, StoredLeaf)]
    if len(stored) < len(selected.leaves):
        return None
    views = views_of_files(selected.record, selected.rank)
    return None if views is None else [(each, views[each.stored.name]) for each in stored]


@contextlib.contextmanager
def _verified(selected: Selected, stored: Sequence[StoredLeaf]) -> Iterator[None]:
    """A thread verifies the leaves in this order, which should be that in which the block writes: it then
    reads each from the disk first. The end of the block waits for it."""
    is_left = threading.Event()
    done, total = 0, selected.num_bytes

    def verify() -> None:
        nonlocal done
        for each in stored:
            for piece in each.pieces():
                if is_left.is_set():
                    return
                done += len(piece)
                selected.progress(done, total)

    with ThreadPoolExecutor(1, "flashckpt-verify") as pool:
        verified = pool.submit(verify)
        try:
            yield
        except BaseException:
            is_left.set()
            raise
        verified.result()


def _in_scratch_file(selected: Selected) -> Sequence[tuple[Leaf, torch.Tensor]]:
    # The file has no name: whatever ends this process also frees its blocks.
    with tempfile.TemporaryFile(dir=selected.folder, buffering=0) as file:
        offset = write_image(file.fileno(), selected)
        size = os.fstat(file.fileno()).st_size
        image = memoryview(mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE))
    found = []
    for each in in_file_order(selected.leaves):
        found.append((each.leaf, leaf_view(image, each.leaf, offset)))
        offset += each.leaf.num_bytes
    return found
