"""A live state that several steps were read into is trained only if the last one fills all of it."""

import pytest
from torch import nn

from flashckpt.errors import StateError
from flashckpt.format.names import AttemptName
from flashckpt.restore.poison import Writing
from flashckpt.restore.snapshot import Snapshot
from flashckpt.state.tree import PARTIAL, Tree


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
    writing.into(first, {"model.weight": model.weight})
    writing.check(first)
    for is_read in (False, True):
        writing.into(second, {}) if is_read else None
        with pytest.raises(StateError, match="may have no value for all of it"):
            writing.check(second)
    writing.check(own)
