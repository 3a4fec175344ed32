"""The NUMA node next to a PCI device, and memory that prefers a node.

Never raises: a slot on another socket is slower to copy to, and as good otherwise.
"""

from __future__ import annotations

import logging
from pathlib import Path

from flashckpt import _native

log = logging.getLogger(__name__)

NO_NODE = -1
MOST_NODES = 1024
_SYSFS = Path("/sys")


def node_of_pci(domain: int, bus: int, device: int, sysfs: Path = _SYSFS) -> int:
    """The node of a PCI device's function 0. NO_NODE where the machine has one node only, or does not say."""
    place = sysfs / "bus/pci/devices" / f"{domain:04x}:{bus:02x}:{device:02x}.0" / "numa_node"
    try:
        node = int(place.read_text())
        nodes = sum(
            each.name.removeprefix("node").isdigit() for each in (sysfs / "devices/system/node").iterdir()
        )
    except (OSError, ValueError):
        return NO_NODE
    return node if nodes > 1 and 0 <= node < MOST_NODES else NO_NODE


def prefer(descriptor: int, num_bytes: int, node: int) -> None:
    """Take the memory of a file on tmpfs from this node, as long as it has some: to be called before any is
    taken. The policy belongs to the file, for every process that maps it. NO_NODE: nothing is changed."""
    if node == NO_NODE:
        return
    try:
        _native.prefer_node(descriptor, num_bytes, node)
    except OSError as error:
        # Containers without CAP_SYS_NICE may forbid it, and kernels without NUMA do not know it.
        log.info("memory of NUMA node %d cannot be preferred (%s): slots come from any node", node, error)
