"""A runtime folder, and files in memory, that go with the test."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from flashckpt.memory.runtime import RuntimeFolder
from tests.descriptors import closed_after

IDENTITY = "0123456789abcdef" * 2


@pytest.fixture
def folder(runtime: Path) -> RuntimeFolder:
    return closed_after(RuntimeFolder.open(str(runtime), IDENTITY))


@pytest.fixture
def memfd() -> Callable[..., int]:
    """Makes a file in memory of so many bytes."""

    def make(num_bytes: int = 0) -> int:
        descriptor = closed_after(os.memfd_create("file"))
        os.ftruncate(descriptor, num_bytes)
        return descriptor

    return make
