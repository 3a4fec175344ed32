"""The selected tensors as mapped memory, for writers that take torch tensors: anonymous memory stays bounded,
and every byte is verified before the first tensor is returned."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence

import torch

from flashckpt.export.formats import Selected, in_file_order, read_ahead, write_image
from flashckpt.export.selection import StoredLeaf
from flashckpt.format.layout import Leaf
from flashckpt.restore.mapping import views_of_files
from flashckpt.restore.snapshot import leaf_view


def mapped_tensors(selected: Selected) -> dict[str, torch.Tensor]:
    """Every tensor under each of its names; tied names give one tensor. The run's own files are mapped where
    they hold the exported bytes. Otherwise the tensors are written to a file without a name beside the
    destination, and that is mapped. Raises DamagedError, and OSError where the disk is full."""
    pairs = _in_files(selected) or _in_scratch_file(selected)
    return {name: tensor for leaf, tensor in pairs for name in (leaf.name, *leaf.aliases)}


def _in_files(selected: Selected) -> Sequence[tuple[Leaf, torch.Tensor]]:
    """Empty where the files of the run do not hold these tensors as they are exported."""
    stored = [each for each in selected.leaves if isinstance(each, StoredLeaf)]
    if len(stored) < len(selected.leaves):
        return []
    views = views_of_files(selected.record, selected.rank)
    if views is None:
        return []
    done, total = 0, selected.num_bytes
    ordered = sorted(stored, key=lambda each: each.place)
    for piece in read_ahead(piece for each in ordered for piece in each.pieces()):
        done += len(piece)
        selected.progress(done, total)
    return [(each.leaf, views[each.stored.name]) for each in stored]


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
