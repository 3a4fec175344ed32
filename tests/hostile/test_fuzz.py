"""The fuzzer, bounded: every reader with a thousand inputs of a fixed seed, and that it can fail."""

import itertools
import random

import pytest

from flashckpt.errors import DamagedError
from tests.hostile.fuzz import Target, fuzz, look, main, targets

TARGETS = targets()


@pytest.mark.parametrize("name", TARGETS)
def test_a_reader(name: str) -> None:
    target = TARGETS[name]
    for data in target.corpus:
        target.read(data)
        assert target.repair(data) == data, "what is whole is as it would be made right again"
    assert fuzz(name, target, random.Random(4), 1000) is None


def test_a_control_page_that_lies_about_sizes() -> None:
    """With checksums that are right: found by the fuzzer's long run."""
    target = TARGETS["slot"]
    values = [0, 1, 4096, 1 << 40, 1 << 62, (1 << 64) - 4096, (1 << 64) - 1]
    for slot, place, value in itertools.product(target.corpus, range(48, 96, 8), values):
        data = bytearray(slot)
        data[place : place + 8] = value.to_bytes(8, "little")
        assert look("slot", target, target.repair(bytes(data))) is None, (place, value)


def test_the_fuzzer_sees_a_reader_that_stumbles() -> None:
    def stumbling(data: bytes) -> None:
        if len(data) < 8:
            raise DamagedError("short")
        if data[2] & 0x40:
            raise IndexError("found")

    finding = fuzz("stumbling", Target([bytes(16)], stumbling), random.Random(1), 1000)
    assert "IndexError: found" in finding.story
    assert look("stumbling", Target([b""], stumbling), finding.data) is not None
    assert look("stumbling", Target([b""], stumbling), b"") is None


def test_its_program(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.setrlimit", lambda which, limits: None)
    assert main(["--minutes", "0.001", "--seed", "9"]) == 0
    assert "seed 9" in capsys.readouterr().out
