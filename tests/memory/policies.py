"""What the kernel says of the NUMA policy of memory."""

import ctypes
import os
import platform

import pytest

from flashckpt import _native

DEFAULT, PREFERRED = 0, 1
_GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
_OF_AN_ADDRESS = 2


def policy_of(descriptor: int, num_bytes: int) -> tuple[int, int]:
    """Mode and mask of nodes of a file's memory, as each process that maps it finds them. Skips the test
    where the kernel gives no policy."""
    number = _GET_MEMPOLICY.get(platform.machine())
    if number is None:
        pytest.skip(f"the number of get_mempolicy on {platform.machine()} is not known here")
    mapping = _native.Mapping(descriptor, num_bytes)
    mode, nodes = ctypes.c_int(-1), (ctypes.c_ulong * 16)()
    address = ctypes.c_void_p(_native.address_of(mapping) + num_bytes - 4096)
    libc = ctypes.CDLL(None, use_errno=True)
    most = ctypes.c_ulong(8 * ctypes.sizeof(nodes))
    failed = libc.syscall(number, ctypes.byref(mode), nodes, most, address, ctypes.c_ulong(_OF_AN_ADDRESS))
    if failed:
        pytest.skip(f"this kernel gives no policy of memory: {os.strerror(ctypes.get_errno())}")
    mapping.close()
    return mode.value, nodes[0]
