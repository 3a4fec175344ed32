"""The selected tensors as mapped memory, for writers that take torch tensors: anonymous memory stays bounded,
and an export appears only once every byte of it is verified."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import threading
from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from flashckpt import _native
from flashckpt.export.formats import Selected, in_file_order, write_image
from flashckpt.export.selection import StoredLeaf
from flashckpt.format.layout import Leaf
from flashckpt.restore.mapping import views_of_files
from flashckpt.restore.snapshot import leaf_view

_THREADS = 2
# Native code reads a batch without the interpreter's lock, which safetensors holds while it writes a file.
_BATCH_BYTES = 1 << 30


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
        with _verified(selected, stored):
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
def _verified(selected: Selected, stored: Sequence[tuple[StoredLeaf, torch.Tensor]]) -> Iterator[None]:
    """A thread computes the digests of what is mapped, in this order. It should be that in which the block
    writes: the thread then reads each tensor from the disk first. The end of the block waits for it."""
    is_left = threading.Event()

    def verify() -> None:
        done = 0
        for batch in _batches(stored):
            if is_left.is_set():
                return
            for (leaf, _), digest in zip(batch, _digests([tensor for _, tensor in batch]), strict=True):
                leaf.check(digest)
                done += leaf.leaf.num_bytes
            selected.progress(done, selected.num_bytes)

    with ThreadPoolExecutor(1, "flashckpt-verify") as pool:
        verified = pool.submit(verify)
        try:
            yield
        except BaseException:
            is_left.set()
            raise
        verified.result()


def _batches(
    stored: Sequence[tuple[StoredLeaf, torch.Tensor]],
) -> Iterator[list[tuple[StoredLeaf, torch.Tensor]]]:
    batch, num_bytes = list[tuple[StoredLeaf, torch.Tensor]](), 0
    for each in stored:
        batch.append(each)
        num_bytes += each[0].leaf.num_bytes
        if num_bytes >= _BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def _digests(tensors: Sequence[torch.Tensor]) -> array[int]:
    addresses = array("Q", [tensor.data_ptr() for tensor in tensors])
    sizes = array("Q", [tensor.nbytes for tensor in tensors])
    found = array("Q", bytes(8 * len(tensors)))
    _native.digest_many(addresses, sizes, _native.address_of(found), _THREADS)
    return found


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
