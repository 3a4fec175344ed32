"""A live state that several steps were read into is trained only if the last one fills all of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from flashckpt.errors import StateError
from flashckpt.format.names import AttemptName
from flashckpt.restore.poison import Writing
from flashckpt.restore.snapshot import Snapshot
from flashckpt.state.tree import PARTIAL, Tree


def of(model: nn.Linear) -> dict[str, Tensor]:
    return {"model.weight": model.weight}


def snapshot(*, is_imported: bool) -> Snapshot:
    state = {"entries": {}} | ({PARTIAL: True} if is_imported else {})
    attempt = AttemptName(1, "00000000")
    return Snapshot(
        step=4, attempt=attempt, boundary=4, tier="local", leaves={}, digests={}, values={"state": state}
    )


def test_an_imported_step_is_not_restored_over_what_another_step_was_read_into() -> None:
    model = nn.Linear(3, 3)
    first, second, own = (snapshot(is_imported=each) for each in (True, True, False))
    writing = Writing(Tree({"model": model}))
    writing.check(first)
    writing.into(first, of(model))
    writing.check(first)
    for is_read in (False, True):
        writing.into(second, {}) if is_read else None
        with pytest.raises(StateError, match="may have no value for all of it"):
            writing.check(second)
    writing.check(own)


def test_a_poison_is_lifted_by_a_step_that_fills_all() -> None:
    model = nn.Linear(3, 3)
    tree, own = Tree({"model": model}), snapshot(is_imported=False)
    failed = Writing(tree)
    failed.into(own, of(model))
    failed.failed(ValueError("as a test wants"))
    with pytest.raises(StateError, match="as a test wants"):
        model(torch.ones(1, 3))
    later, imported = Writing(tree), snapshot(is_imported=True)
    later.into(imported, of(model))
    with pytest.raises(StateError, match="may have no value for all of it"):
        later.check(imported)
    later = Writing(tree)
    with pytest.raises(StateError, match="has loaded none"):
        later.succeeded()
    later.begun = True
    later.check(own)
    later.succeeded()
    model(torch.ones(1, 3))
