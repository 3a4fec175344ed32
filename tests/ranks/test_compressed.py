"""The state of a communication hook of DDP: exact where it is named, and warned of where it is not."""

from pathlib import Path

import pytest

from tests.ranks.launch import Launcher

pytestmark = pytest.mark.dist
PROGRAM, WARNING = (
    "tests.ranks.compressed",
    "communication hook of DDP has a PowerSGDState, which is not saved",
)


def test_error_feedback_that_is_named_goes_on_bit_for_bit_and_else_is_warned_of_once(
    launcher: Launcher, tmp_path: Path
) -> None:
    first = launcher.fork(PROGRAM, tmp_path / "run", 12, 1).finished()
    rest = launcher.fork(PROGRAM, tmp_path / "run", 20, 1).finished()
    whole = launcher.fork(PROGRAM, tmp_path / "whole", 20, 0).finished()
    for rank in range(2):
        assert rest[rank].out[0] == "resumed 12"
        assert first[rank].out[1:] + rest[rank].out[1:] == whole[rank].out[1:]
        assert [each[rank].err.count(WARNING) for each in (first, rest, whole)] == [0, 0, 1]
