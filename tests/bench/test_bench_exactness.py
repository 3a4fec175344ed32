"""The benchmark compares what a peer loads with what it saved: a peer that loads something else is told."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import load, measure
from benchmarks.settings import MIB, Job, for_machine, quick
from benchmarks.workload import checksum, shape_of


def test_one_flipped_bit_is_told(tmp_path: Path) -> None:
    """In a checkpoint of torch.save."""
    settings = replace(quick(for_machine(tmp_path, cuda=False, threads=1)), state_bytes=4 * MIB)
    _, result = measure.measure(settings, "torch_save", tmp_path)
    folder, into = str(tmp_path), str(tmp_path / "result.json")
    saved = Job(settings=settings, peer="torch_save", folder=folder, result=into, extra=result["last"])
    result = load.load(saved)
    assert (result["exact"], result["differ"]) == (True, 0)
    [path] = tmp_path.glob("*.pt")
    state: dict[str, Any] = torch.load(path)
    moment = state["optimizer"]["state"][0]["exp_avg"]
    moment.view(torch.int32)[0, 0] ^= 1
    torch.save(state, path)
    result = load.load(saved)
    assert (result["exact"], result["differ"]) == (False, 1)


@pytest.mark.parametrize("state_bytes", [64 * MIB, 1024 * MIB, 8192 * MIB])
def test_the_state_is_as_large_as_asked_and_hardly_larger(state_bytes: int) -> None:
    layers = 12
    width, vocabulary = shape_of(state_bytes, layers)
    made = 12 * (layers * (12 * width**2 + 13 * width) + 2 * vocabulary * width)
    assert state_bytes <= made < 1.02 * state_bytes


def test_a_checksum_sees_bits_and_places_and_adds_up_over_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.workload._PIECE", 100)
    leaf = torch.randn(1003)
    known = checksum(leaf)
    assert checksum(leaf.clone().view(17, 59)) == known
    parts = checksum(leaf[:401]) + checksum(leaf[401:], first=401)
    assert (parts - known) % 2**64 == 0
    flipped, swapped = leaf.clone(), leaf.clone()
    flipped.view(torch.int32)[700] ^= 1 << 31
    swapped[[3, 900]] = leaf[[900, 3]]
    assert len({known, checksum(flipped), checksum(swapped), checksum(leaf[:-1])}) == 4
