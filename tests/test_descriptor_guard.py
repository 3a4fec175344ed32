"""Which descriptors a test may leave open: those of a CUDA context, and few others."""

from collections import Counter

import pytest

from tests.descriptor_guard import too_many

_OF_A_CONTEXT = {
    "/dev/nvidiactl": 12,
    "/dev/nvidia-uvm": 4,
    "/dev/nvidia0": 70,
    "/dev/nvidia-caps/nvidia-cap2": 1,
    "anon_inode:[eventfd]": 9,
    "pipe:[1234]": 4,
}


@pytest.mark.parametrize(
    ("opened", "refused"),
    [
        ({}, {}),
        (_OF_A_CONTEXT, {}),
        ({"/memfd:slot-1": 4}, {}),
        ({"/memfd:slot-1": 6}, {"/memfd:slot-1": 6}),
        # A context hides no leak.
        ({**_OF_A_CONTEXT, "/memfd:slot-1": 6}, {"/memfd:slot-1": 6}),
        ({"socket:[7]": 65}, {"socket:[7]": 65}),
    ],
)
def test_a_context_may_stay_and_a_leak_may_not(opened: dict[str, int], refused: dict[str, int]) -> None:
    before = Counter({"/dev/null": 2, "/memfd:slot-1": 1})
    assert too_many(before, before + Counter(opened)) == refused
