"""The harness finds what a broken resume changes."""

import pytest
import torch

from tests.integrations import harness
from tests.integrations.harness import Cases

IMPORTED = ("tests.integrations.plain.cases",)


@pytest.mark.parametrize("forget", ["random numbers", "counter"])
def test_a_broken_resume_is_found(cases: Cases, forget: str) -> None:
    # A value that is logged again after the kill is another one.
    with pytest.raises(AssertionError, match=r"is .* in attempt \d+ and .* in attempt \d+"):
        cases.check("loop", plain=False, again=False, forget=forget)


def test_differences_are_named() -> None:
    a = {"x": torch.zeros(3), "y": [1, 2.0, float("nan")], "z": -0.0, "only": 1}
    b = {"x": torch.tensor([0.0, -0.0, 1.0]), "y": [1.0, 2.0, float("nan")], "z": 0.0}
    found = harness.differences(a, b)
    assert [each.split(":")[0] for each in found] == [".only", ".x", ".y[0]", ".z"]
    assert not harness.differences(a, {**a, "x": torch.zeros(3)})
