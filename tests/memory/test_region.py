"""Memfds of another process."""

from __future__ import annotations

import contextlib
import errno
import os
import resource

import pytest

from flashckpt.memory.region import memfds_of, region_name


def test_memfds_that_cannot_all_be_opened_are_closed() -> None:
    with contextlib.ExitStack() as stack:
        for nonce in (1, 2, 3):
            stack.callback(os.close, os.memfd_create(region_name(0, 0, nonce), os.MFD_CLOEXEC))
        assert len(found := memfds_of(os.getpid())) == 3
        for each in found.values():
            os.close(each)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        there = set(map(int, os.listdir("/proc/self/fd")))
        # Two more descriptors fit: that of this listing, which is closed, and the first free one.
        free = [number for number in range(soft) if number not in there]
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (free[1], hard))
        with pytest.raises(OSError, match="Too many open files") as raised:
            memfds_of(os.getpid())
        assert raised.value.errno == errno.EMFILE
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert set(map(int, os.listdir("/proc/self/fd"))) == there
