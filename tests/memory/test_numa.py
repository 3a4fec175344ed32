"""Slots come from the NUMA node of their rank's device."""

import logging
import os
from pathlib import Path

import pytest

from flashckpt.memory import memory_budget, region
from flashckpt.memory.runtime import RuntimeFolder
from tests.memory.policies import PREFERRED, policy_of

NAME = "slot-00000-0-00000000000000ab"
SIZE = (3 << 21) + 8192


def sysfs(root: Path, nodes: int, said: str) -> Path:
    """What the kernel says of a machine of so many nodes and of one GPU at 0000:1b:03.0."""
    for number in range(nodes):
        (root / "devices/system/node" / f"node{number}").mkdir(parents=True)
    (root / "devices/system/node").mkdir(parents=True, exist_ok=True)
    (root / "devices/system/node/online").write_text("0")
    gpu = root / "bus/pci/devices/0000:1b:03.0"
    gpu.mkdir(parents=True)
    (gpu / "numa_node").write_text(said)
    return root


@pytest.mark.parametrize(
    ("nodes", "said", "node"),
    [
        (2, "1\n", 1), (2, "0\n", 0), (1, "0\n", -1), (2, "-1\n", -1), (2, "", -1), (2, "1024\n", -1),
        (0, "0\n", -1),
    ],
)  # fmt: skip
def test_the_node_of_a_device_is_what_the_kernel_says(
    tmp_path: Path, nodes: int, said: str, node: int
) -> None:
    assert memory_budget.node_of_pci(0, 0x1B, 3, sysfs(tmp_path, nodes, said)) == node
    assert memory_budget.node_of_pci(1, 0x1B, 3, tmp_path) == memory_budget.NO_NODE, "no such device"


@pytest.mark.parametrize("kind", [region.NAMED, region.MEMFD])
def test_a_region_prefers_its_node_for_every_process(folder: RuntimeFolder, kind: str) -> None:
    made = region.create(folder, NAME, SIZE, kind, node=0)
    assert made.kind == kind
    assert policy_of(made.descriptor, SIZE) == (PREFERRED, 1)
    assert os.fstat(made.descriptor).st_blocks * 512 == SIZE
    os.close(made.descriptor)


def test_a_node_that_the_kernel_refuses_costs_no_region(
    folder: RuntimeFolder, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "flashckpt")
    made = region.create(folder, NAME, SIZE, region.MEMFD, node=memory_budget.MOST_NODES - 1)
    assert "NUMA node 1023 cannot be preferred" in caplog.text
    assert os.fstat(made.descriptor).st_blocks * 512 == SIZE
    os.close(made.descriptor)
