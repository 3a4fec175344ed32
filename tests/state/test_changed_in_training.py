"""State that changes its form during training: a buffer is restored as it was saved; parameters and groups
that the same script would not build are logged."""

import copy

import pytest
import torch
from torch import nn

from flashckpt.errors import MismatchError
from flashckpt.state.tree import Tree
from tests.state.image import capture, restore


class Observed(nn.Module):
    """A layer with an observer of its outputs, like torch.ao's: ranges that start empty and get a shape."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.layer = nn.Linear(4, width)
        self.register_buffer("min_val", torch.tensor([]))
        self.register_buffer("kept", torch.zeros(2))

    def observe(self, *, in_place: bool) -> None:
        lowest = self.layer(torch.ones(2, 4)).detach().amin(dim=0)
        if in_place:
            self.min_val.resize_(lowest.shape).copy_(lowest)
        else:
            self.min_val = lowest


@pytest.mark.parametrize("in_place", [False, True])
def test_a_buffer_whose_shape_changed_is_restored(in_place: bool) -> None:
    model = Observed()
    tree = Tree({"model": model})
    model.observe(in_place=in_place)
    for _ in range(2):  # the restored buffer is known to change, too
        again = Observed()
        fresh = Tree({"model": again})
        restore(fresh, capture(tree))
        assert again.min_val.shape == (3,)
        assert "min_val" in again.state_dict(), "it is as persistent as before"
        tree = fresh


def test_observers_of_torch_are_restored() -> None:
    from torch.ao.quantization import MinMaxObserver, PerChannelMinMaxObserver

    first = nn.Sequential(nn.Linear(4, 3), PerChannelMinMaxObserver(ch_axis=1), MinMaxObserver())
    again, tree = copy.deepcopy(first), Tree({"model": first})
    first(torch.ones(2, 4))
    restore(Tree({"model": again}), capture(tree))
    saved, found = first.state_dict(), again.state_dict()
    assert saved.keys() == found.keys()
    assert all(torch.equal(saved[name], found[name]) for name in saved)


def test_other_changes_of_shape_are_differences() -> None:
    """Another layer is another model, and so is a buffer that never changed its shape."""
    model = Observed()
    tree = Tree({"model": model})
    model.observe(in_place=False)
    image = capture(tree)
    wider, double = Observed(), Observed()
    wider.kept = torch.zeros(7)
    double.min_val = torch.tensor([], dtype=torch.float64)
    places = {"layer.weight": Observed(width=5), "kept": wider, "min_val": double}
    for place, other in places.items():
        before = copy.deepcopy(other.state_dict())
        with pytest.raises(MismatchError) as caught:
            Tree({"model": other}).restore(image.saved())
        assert f"model.{place}" in {row[0] for row in caught.value.differences}
        assert all(torch.equal(before[name], each) for name, each in other.state_dict().items())


@pytest.mark.parametrize("what", ["model.1.weight", "optimizer.groups.1"])
def test_parameters_and_groups_added_in_training_are_logged_once(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, more = nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tree = Tree({"model": model, "more": more, "optimizer": optimizer})
    capture(tree)
    assert "have changed since attach" not in caplog.text
    if what == "model.1.weight":
        model.append(nn.Linear(4, 4, bias=False))
    else:
        optimizer.add_param_group({"params": list(more.parameters())})
    image = capture(tree)
    capture(tree)
    [message] = [r.getMessage() for r in caplog.records if "have changed since attach" in r.getMessage()]
    assert f"({what})" in message
    assert "MismatchError" in message
    again = nn.Sequential(nn.Linear(4, 4))
    named = {"model": again, "more": more, "optimizer": torch.optim.SGD(again.parameters(), lr=0.1)}
    assert what.rpartition(".")[0] in str(Tree(named).differences(image.saved()))
