"""A live tensor that a step was read into, and that the restored step does not fill, is found."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from flashckpt.errors import StateError
from flashckpt.restore.poison import Writing
from flashckpt.state.tree import Tree


def of(model: nn.Linear) -> dict[str, Tensor]:
    return {"model.weight": model.weight, "model.bias": model.bias}


def test_the_restored_step_comes_from_memory() -> None:
    """It is not read into live tensors: only the step before it was."""
    model = nn.Linear(3, 3)
    writing = Writing(Tree({"model": model}))
    writing.into(of(model))
    writing.check(of(model).items())
    writing.check([("model.tied", model.weight), ("model.bias", model.bias)])
    with pytest.raises(StateError, match=r"into model\.bias before") as raised:
        writing.check([("model.weight", model.weight)])
    assert raised.value.location == "model.bias"


def test_a_tensor_that_is_no_part_of_the_state_any_more_is_no_matter() -> None:
    model = nn.Linear(3, 3)
    writing = Writing(Tree({"model": model}))
    writing.into(of(model))
    before, model.bias = model.bias, None
    writing.check([("model.weight", model.weight)])
    assert before is not None


def test_a_poison_is_lifted_only_where_all_is_filled_that_the_failed_start_wrote_into() -> None:
    model = nn.Linear(3, 3)
    tree = Tree({"model": model})
    failed = Writing(tree)
    failed.into(of(model))
    failed.failed(ValueError("as a test wants"))
    with pytest.raises(StateError, match="as a test wants"):
        model(torch.ones(1, 3))
    later = Writing(tree)
    with pytest.raises(StateError, match=r"into model\.bias before"):
        later.check([("model.weight", model.weight)])
    with pytest.raises(StateError, match="has loaded none"):
        later.succeeded()
    later.begun = True
    later.check(of(model).items())
    later.succeeded()
    model(torch.ones(1, 3))
