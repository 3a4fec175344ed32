"""A checkpoint of another state gives a table of differences and changes nothing."""

from typing import Any

import pytest
import torch
from torch import nn

from flashckpt.errors import DamagedError, MismatchError
from flashckpt.state.tree import Tree
from tests.state.image import capture, raw_bytes
from tests.state.test_objects import Metric


def test_a_checkpoint_of_another_state_is_a_table_and_changes_nothing() -> None:
    def build(width: int, more: bool, dtype: torch.dtype) -> tuple[nn.Module, Tree]:
        model = nn.Sequential(nn.Linear(2, width, dtype=dtype), nn.Linear(width, 1, dtype=dtype))
        if more:
            model.append(nn.Linear(1, 1, dtype=dtype))
        groups = [{"params": list(model[0].parameters())}, {"params": list(model[1].parameters())}]
        named: dict[str, Any] = {
            "model": model,
            "optimizer": torch.optim.Adam(groups if more else groups[:1]),
        }
        if more:
            named["metric"] = Metric()
        return model, Tree(named)

    _, tree = build(3, False, torch.float32)
    model, other = build(4, True, torch.float64)
    image = capture(tree)
    before = [raw_bytes(p) for p in model.parameters()]
    rows = other.differences(image.saved())
    assert set(rows) >= {
        ("model.0.weight", "float32 (3, 2)", "float64 (4, 2)"),
        ("model.2.bias", "missing", "float64 (1,)"),
        ("optimizer.groups", "1 groups", "2 groups"),
        ("metric", "missing", "object"),
    }
    with pytest.raises(MismatchError) as caught:
        other.restore(image.saved())
    assert set(caught.value.differences) == set(rows)
    assert [raw_bytes(p) for p in model.parameters()] == before
    reverse = tree.differences(capture(other).saved())
    assert ("model.2.bias", "float64 (1,)", "missing") in reverse
    assert ("metric", "object", "missing") in reverse


def test_parameters_in_another_order_are_a_difference() -> None:
    model = nn.Linear(2, 2)
    image = capture(Tree({"model": model, "o": torch.optim.Adam(model.parameters())}))
    turned = torch.optim.Adam(list(model.parameters())[::-1])
    assert Tree({"model": model, "o": turned}).differences(image.saved()) == [
        ("o.groups.0.params[0]", "model.weight", "model.bias"),
        ("o.groups.0.params[1]", "model.bias", "model.weight"),
    ]
    other = torch.optim.SGD(model.parameters())
    assert Tree({"model": model, "o": other}).differences(image.saved()) == [("o", "Adam", "SGD")]


@pytest.mark.parametrize(
    "value", [{}, {"entries": {}}, {"entries": {"m": {}}, "gradients": {}}, {"entries": 3}]
)
def test_values_of_another_form_are_damaged_and_change_nothing(value: Any) -> None:
    tree = Tree({"m": nn.Linear(1, 1)})
    saved = capture(tree).saved()
    with pytest.raises((DamagedError, MismatchError)):
        tree.restore(type(saved)(saved.leaves, value, saved.tensor))
