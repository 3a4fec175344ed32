"""From a verified snapshot into the live state, and the proof that it arrived.

Nothing live changes before everything of the snapshot is known to fit. After the filling every live
tensor is digested where it is and compared with the digest taken at its boundary.
"""

from __future__ import annotations

from array import array
from typing import NoReturn

import torch

from flashckpt import _native
from flashckpt.capture.digests import digest_tensors
from flashckpt.errors import DamagedError, MismatchError, StateError
from flashckpt.restore.snapshot import Snapshot
from flashckpt.state.tree import Saved, Tree

_ROWS_SHOWN = 40


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


def fill(tree: Tree, snapshot: Snapshot, threads: int) -> None:
    """Make the live state that of a snapshot that fits.

    Raises DamagedError if a live tensor is not bit for bit what was saved after it was filled, StateError
    if the program's own code took its part back as something else (the live state is then not to be
    trusted).
    """
    with torch.no_grad():
        filled = tree.restore(snapshot.saved)
    _check_arrived(snapshot, filled, threads, tree.own_code)


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
