"""From a verified snapshot into the live state, and the proof that it arrived.

Nothing live changes before everything of the snapshot is known to fit. After the filling every live
tensor is digested where it is and compared with the digest taken at its boundary.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from flashckpt import _native
from flashckpt.capture.devices import PIECE_BYTES, Device
from flashckpt.capture.digests import digest_tensors
from flashckpt.errors import DamagedError, MismatchError, StateError
from flashckpt.restore.snapshot import Snapshot
from flashckpt.state import tensors
from flashckpt.state.tree import Saved, Tree

_ROWS_SHOWN = 40
# One is filled, one is read, one waits for its turn.
_BUFFERS = 3


def check_fits(tree: Tree, snapshot: Snapshot) -> None:
    """Whether the live state can be made that of the snapshot. Changes nothing.

    Raises MismatchError if it does not fit, DamagedError if the snapshot's values are not whole.
    """
    check_values(tree, snapshot.saved, snapshot.step)


def check_values(tree: Tree, saved: Saved, step: int) -> None:
    """The same of what is known of a snapshot before its bytes are read."""
    differences = tree.differences(saved)
    if differences:
        raise MismatchError(
            f"The checkpoint of step {step} is of another model: {len(differences)} things differ. "
            "Nothing was loaded, the live model is as it was, and no older step is tried.\n"
            f"{table_of(differences)}\n"
            "Make the program build what was saved, or give this model a run folder of its own.",
            differences=tuple(differences),
            step=step,
        )


def fill(tree: Tree, snapshot: Snapshot, threads: int, devices: Sequence[Device] = ()) -> None:
    """Make the live state that of a snapshot that fits. `devices` hold some of it.

    Raises DamagedError if a live tensor is not bit for bit what was saved after it was filled, StateError
    if the program's own code took its part back as something else (the live state is then not to be
    trusted).
    """
    with torch.no_grad():
        filled = tree.restore(snapshot.saved, StagedUploads(devices))
    _check_arrived(snapshot, filled, threads, tree.own_code)


class StagedUploads:
    """Fills tensors on devices from page-locked memory: the host copies into one buffer while a device reads
    another. A copy from pageable memory would wait for its device, once a tensor."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = devices

    def takes(self, live: Tensor) -> bool:
        # An inference tensor is written in inference mode alone, in which a device launches nothing.
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
        except RuntimeError:  # the machine has no page-locked memory to spare
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
    """Page-locked buffers of one device, in turn: filled, read by the device, filled again."""

    def __init__(self, device: Device, num_bytes: int) -> None:
        self._device, self._size = device, min(PIECE_BYTES, num_bytes)
        count = min(_BUFFERS, -(-num_bytes // self._size))
        self._buffers = [(device.host_memory(self._size), device.new_mark()) for _ in range(count)]
        self._turn = self._end = 0

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Enqueue it, in pieces; both are bytes. Waits only until a buffer has been read."""
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
    """What differs, as an aligned table of (name, in the checkpoint, in the live state)."""
    rows = [("", "in the checkpoint", "in the live state"), *differences[:_ROWS_SHOWN]]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
    ]
    if len(differences) > _ROWS_SHOWN:
        lines.append(f"  … and {len(differences) - _ROWS_SHOWN} more")
    return "\n".join(line.rstrip() for line in lines)


def _check_arrived(
    snapshot: Snapshot, filled: list[tuple[str, torch.Tensor]], threads: int, own_code: list[str]
) -> None:
    expected = snapshot.digests_by_name
    found = digest_tensors([tensor for _, tensor in filled], threads)
    wrong = [name for (name, _), digest in zip(filled, found, strict=True) if expected[name] != digest]
    if wrong:
        _refuse_arrived(snapshot.step, wrong, own_code)


def _refuse_arrived(step: int, wrong: list[str], own_code: list[str]) -> NoReturn:
    what = (
        f"{len(wrong)} tensors are not what step {step} holds after they were loaded ({', '.join(wrong[:5])})"
    )
    copied = "the copy went wrong between host memory and the device"
    after = "The live state is not to be trusted; the checkpoint is intact."
    if not own_code:
        raise DamagedError(
            f"{what}: {copied}. {after} Start again, on another device if it happens twice.", step=step
        )
    theirs = [name for name in own_code if any(leaf.startswith(f"{name}.") for leaf in wrong)]
    message = (
        f"{what}: either load_state_dict or set_extra_state of {', '.join(theirs or own_code)} made "
        f"something else of them, or {copied}. {after} Let these methods keep every value as it is; if they "
        "do, start again, on another device if it happens twice."
    )
    if theirs:
        raise StateError(message, location=theirs[0], step=step)
    raise DamagedError(message, step=step)


def audit(snapshot: Snapshot, threads: int) -> list[str]:
    """Names of the leaves whose bytes in the image are not those that their digests were taken of."""
    places = snapshot.places()
    found = array("Q", bytes(8 * len(places)))
    _native.digest_many(
        array("Q", [_native.address_of(image) + start for image, _, start in places]),
        array("Q", [leaf.num_bytes for _, leaf, _ in places]),
        _native.address_of(found),
        threads,
    )
    pairs = zip(places, found, snapshot.digests, strict=True)
    return [leaf.name for (_, leaf, _), digest, expected in pairs if digest != expected]
