"""Gradients that the next iteration reads, and large arrays, on other numbers of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks.launch import Launcher

pytestmark = pytest.mark.dist
PROGRAM, DIFFERS = "tests.ranks.valued", "own differs from rank to rank in step"


def test_they_come_back_and_arrays_that_differ_are_said(launcher: Launcher, tmp_path: Path) -> None:
    ended = launcher.fork(PROGRAM, tmp_path / "run", 3, ranks=2).finished()
    [ends] = {rank.out[-1] for rank in ended}
    for number, rank in enumerate(launcher.fork(PROGRAM, tmp_path / "run", 6, ranks=3).finished()):
        resumed, begins, array, _ = rank.out
        assert resumed == "resumed 3"
        assert begins == ends.replace("ends", "begins")
        assert array == f"array {number % 2}"
        assert DIFFERS in rank.err
