"""Whether a snapshot fits the live state, and its way into it.

Nothing live changes before the whole snapshot is known to fit. Each live tensor is digested in place and
compared with the digest of its boundary: here, or once it was read from storage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from flashckpt.capture.devices import PIECE_BYTES, Device, digest_tensors
from flashckpt.capture.plan import local
from flashckpt.commit.steps import StepRecord
from flashckpt.errors import DamagedError, MismatchError, StateError
from flashckpt.format.layout import Leaf
from flashckpt.restore.snapshot import Snapshot
from flashckpt.restore.step_reading import StepReading
from flashckpt.state import tensors
from flashckpt.state.leaves import LiveLeaf
from flashckpt.state.modules import ModuleEntry
from flashckpt.state.tree import Tree

MARK = "imported"
"""The section of a rank's values of an imported step, and the kind of an entry that a `state_dict` gave."""
_ROWS_SHOWN = 40
# One is filled, one is read by the device, one waits.
_BUFFERS = 3


@dataclass(frozen=True)
class LiveLayout:
    """The division of the live state among `world` ranks, on this one."""

    tree: Tree
    rank: int
    world: int

    def is_of(self, world: int, leaves: Iterable[Leaf]) -> bool:
        """Whether the leaves that a rank of `world` ranks has are those that this rank needs."""
        if self.world != world or world == 1:
            return self.world == world
        leaves = list(leaves)
        saved = {name: leaf for leaf in leaves for name in (leaf.name, *leaf.aliases)}
        lives = (leaf for leaf in self.tree.found().leaves if leaf.kind in ("parameter", "buffer"))
        if any(_is_elsewhere(leaf, saved.get(leaf.name)) for leaf in lives):
            return False
        # False for a stage of a pipeline that gave modules to another stage.
        return all(any(map(self._has_place, (leaf.name, *leaf.aliases))) for leaf in leaves)

    def _has_place(self, name: str) -> bool:
        """Whether the live state has the module of this leaf; True for leaves of no module."""
        modules = [each for each in self.tree.entries.values() if isinstance(each, ModuleEntry)]
        owner = next((each for each in modules if name.startswith(f"{each.name}.")), None)
        return owner is None or name.rpartition(".")[0] in owner.modules

    def has(self, record: StepRecord) -> bool:
        """Whether this rank's own leaves of a step are those that it needs."""
        if record.world != self.world or is_imported(record):
            return False
        mine = record.rank(self.rank)
        return self.is_of(record.world, [leaf for _, leaf, _ in (*mine.counted(), *mine.elsewhere())])

    def begin(self, record: StepRecord) -> StepReading:
        """See `begin_for_layout`."""
        from flashckpt.restore.merged_state import begin_for_layout

        return begin_for_layout(self.tree, record, self.rank, self.world)


def is_imported(record: StepRecord) -> bool:
    """Whether `flashckpt import` wrote this step. An import is of one rank."""
    return record.world == 1 and MARK in record.rank(0).values


def _is_elsewhere(live: LiveLeaf, saved: Leaf | None) -> bool:
    if saved is None:
        return True
    is_divided = saved.box is not None or live.box is not None
    return is_divided and (saved.box, saved.shape) != (live.box, tuple(local(live.tensor).shape))


def check_fits(tree: Tree, snapshot: Snapshot) -> None:
    """Raise MismatchError if the snapshot does not fit the live state, DamagedError for malformed values.
    Changes nothing, and needs no tensor of the snapshot."""
    differences = tree.differences(snapshot.saved)
    if differences:
        raise MismatchError(
            f"The checkpoint of step {snapshot.step} is of another model: {len(differences)} things differ. "
            "Nothing of it was loaded, and no older step is tried.\n"
            f"{table_of(differences)}\n"
            "Make the program build what was saved, or give this model a run folder of its own.",
            differences=tuple(differences),
            step=snapshot.step,
        )


def fill(
    tree: Tree, snapshot: Snapshot, threads: int, devices: Sequence[Device] = ()
) -> list[tuple[str, Tensor]]:
    """Make the live state equal to a snapshot that fits, and return the live tensors that it filled, with the
    names of their leaves. devices: hold some of it.

    Raises DamagedError if a restored tensor is not bit for bit the saved one, StateError if the program's own
    code restored its part as something else. The live state is invalid then.
    """
    with torch.no_grad():
        filled = tree.restore(snapshot.saved, StagedUploads(devices))
    # What was read into the live tensor itself was compared there. Only the program's own code may have
    # changed it since.
    expected, read_there = snapshot.digests, {} if tree.own_code else snapshot.tensors
    rows = [(name, tensor) for name, tensor in filled if not _is_same(local(tensor), read_there.get(name))]
    found = digest_tensors([tensor for _, tensor in rows], threads)
    wrong = [name for (name, _), digest in zip(rows, found, strict=True) if expected[name] != digest]
    if wrong:
        _refuse_arrived(snapshot.step, wrong, tree.own_code)
    return filled


def _is_same(live: Tensor, source: Tensor | None) -> bool:
    """Whether both are the same memory, in one order."""
    return source is not None and (
        (live.device, live.data_ptr(), live.shape, live.stride())
        == (source.device, source.data_ptr(), source.shape, source.stride())
    )


class StagedUploads:
    """Fills tensors on devices from page-locked memory: the host copies into one buffer while a device reads
    another. A copy from pageable memory would wait for its device with each tensor."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = devices

    def takes(self, live: Tensor) -> bool:
        # An inference tensor can only be written in inference mode, which launches nothing on a device.
        return not live.is_inference() and self._owner(live) is not None

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        for device in self._devices:
            here = [pair for pair in pairs if self._owner(pair[0]) is device]
            if here:
                self._copy(device, here)

    def _owner(self, live: Tensor) -> Device | None:
        return next((device for device in self._devices if device.owns(live)), None)

    def _copy(self, device: Device, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        try:
            staged = _Staged(device, sum(live.nbytes for live, _ in pairs))
        except RuntimeError:  # no page-locked memory is available
            for live, source in pairs:
                tensors.fill(live, source)
            return
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for live, source in pairs:
                target, data = tensors.distinct_bits(live, source)
                rows = target
                if not target.is_contiguous():
                    rows = torch.empty(data.shape, dtype=data.dtype, device=live.device)
                staged.copy(_bytes_of(rows), _bytes_of(data.contiguous()))
                if rows is not target:
                    _enqueue(device, target, rows)
        device.synchronize()


class _Staged:
    """Page-locked buffers of one device, used in turn."""

    def __init__(self, device: Device, num_bytes: int) -> None:
        self._device, self._size = device, min(PIECE_BYTES, num_bytes)
        count = min(_BUFFERS, -(-num_bytes // self._size))
        self._buffers = [(device.host_memory(self._size), device.new_mark()) for _ in range(count)]
        self._turn = self._end = 0

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Enqueue a copy of bytes, in pieces. Waits only for a buffer that the device still reads."""
        start, end = 0, source.numel()
        while start < end:
            if self._end == self._size:
                self._next()
            buffer, _ = self._buffers[self._turn]
            piece = buffer[self._end : min(self._size, self._end + end - start)]
            stop = start + piece.numel()
            piece.copy_(source[start:stop])
            _enqueue(self._device, target[start:stop], piece)
            self._end, start = self._end + piece.numel(), stop

    def _next(self) -> None:
        self._device.mark(self._buffers[self._turn][1])
        self._turn, self._end = (self._turn + 1) % len(self._buffers), 0
        self._buffers[self._turn][1].wait()


def _enqueue(device: Device, target: Tensor, source: Tensor) -> None:
    def copy() -> None:
        target.copy_(source, non_blocking=True)

    device.launch(copy)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def table_of(differences: list[tuple[str, str, str]]) -> str:
    """Return differences as an aligned table of (name, in the checkpoint, in the live state)."""
    rows = [("", "in the checkpoint", "in the live state"), *differences[:_ROWS_SHOWN]]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
    ]
    if len(differences) > _ROWS_SHOWN:
        lines.append(f"  … and {len(differences) - _ROWS_SHOWN} more")
    return "\n".join(line.rstrip() for line in lines)


def _refuse_arrived(step: int, wrong: list[str], own_code: list[str]) -> NoReturn:
    what = f"{len(wrong)} tensors differ from step {step} after they were loaded ({', '.join(wrong[:5])})"
    copied = "the copy went wrong between host memory and the device"
    after = "The live state is invalid; the checkpoint is intact."
    if not own_code:
        raise DamagedError(
            f"{what}: {copied}. {after} Start again, on another device if it happens twice.", step=step
        )
    theirs = [name for name in own_code if any(leaf.startswith(f"{name}.") for leaf in wrong)]
    message = (
        f"{what}: either load_state_dict or set_extra_state of {', '.join(theirs or own_code)} changed "
        f"them, or {copied}. {after} Let these methods keep every value as it is; if they do, start again, "
        "on another device if it happens twice."
    )
    if theirs:
        raise StateError(message, location=theirs[0], step=step)
    raise DamagedError(message, step=step)
