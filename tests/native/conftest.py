"""The digest kernel and the stand-in for the CUDA driver, compiled once for all tests of a process."""

from pathlib import Path

import pytest
from emulated_kernel import EmulatedKernel, build_kernel
from fake_cuda import build_driver


@pytest.fixture(scope="session")
def kernel_object(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_kernel(tmp_path_factory.mktemp("kernel"))


@pytest.fixture(scope="session")
def kernel(kernel_object: Path) -> EmulatedKernel:
    return EmulatedKernel(kernel_object)


@pytest.fixture(scope="session")
def driver(kernel_object: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_driver(tmp_path_factory.mktemp("driver"), kernel_object)
