"""Gradients that the next iteration reads, and large arrays, on other numbers of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks.launch import Launcher

pytestmark = pytest.mark.dist
PROGRAM, DIFFERS = "tests.ranks.valued", "own differs from rank to rank in step"


def test_they_come_back_and_arrays_that_differ_are_said(launcher: Launcher, tmp_path: Path) -> None:
    ends, arrays = "", {0, 1}
    for steps, layout, ranks in ((3, "fsdp", 2), (6, "fsdp", 3), (9, "whole", 1)):
        ended = launcher.fork(PROGRAM, tmp_path / "run", steps, layout, ranks=ranks).finished()
        for number, rank in enumerate(ended):
            resumed, begins, array, end = rank.out
            assert resumed == (f"resumed {steps - 3}" if ends else "began")
            assert array == f"array {number % len(arrays)}"
            if ends:
                assert begins == ends.replace("ends", "begins")
                assert DIFFERS in rank.err
        [ends] = {rank.out[-1] for rank in ended}
        arrays = set(range(2)) if ranks > 1 else {0}
