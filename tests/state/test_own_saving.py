"""Modules with their own saving: data that would be lost is refused, renamed data is accepted."""

import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from flashckpt.errors import StateError
from flashckpt.state.modules import saves_its_own
from flashckpt.state.tree import Tree
from tests.state.image import Image, all_used_up, capture


class Metric(nn.Module):
    """Keeps its total beside its buffers, as metrics do."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(())

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {**super().state_dict(*args, **kwargs), "total": self.total}

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        self.total = state["total"]


class Shadow(nn.Module):
    """An average of weights, under the weights' own names."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.average = {name: p.detach().clone() for name, p in model.named_parameters()}

    def state_dict(self, **_: Any) -> Any:
        return {f"model.{name}": tensor for name, tensor in self.average.items()}


class Counted(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_state_dict_post_hook(functools.partial(Counted._add))  # type: ignore[no-untyped-call]

    @staticmethod
    def _add(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
        state[prefix + "count"] = 3


class Packed(nn.Module):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "packed"] = 3


@pytest.mark.parametrize(
    ("module", "location"),
    [
        (Packed(), "model.0.packed"),
        (Metric(), "model.0.total"),
        (Shadow(nn.Linear(2, 1)), "model.0.model.weight"),
        (Counted(), "model.0.count"),
    ],
)
def test_data_that_only_state_dict_holds_is_refused(module: nn.Module, location: str) -> None:
    with pytest.raises(StateError, match="own code or a hook") as caught:
        Tree({"model": nn.Sequential(module)})
    assert caught.value.location == location
    assert "get_extra_state" in str(caught.value)


def test_a_state_dict_that_fails_or_returns_no_dict_is_refused() -> None:
    class Failing(nn.Module):
        def state_dict(self) -> Any:  # type: ignore[override]
            raise RuntimeError("not like this")

    with pytest.raises(StateError, match="not like this"):
        Tree({"model": Failing()})


class Renaming(nn.Module):
    """Harmless saving: other names, parts of tensors, without its frozen part, nested."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.BatchNorm1d(4)
        self.frozen = nn.Linear(2, 2)
        self.qkv = nn.Parameter(torch.zeros(6, 2))
        self.register_buffer("nothing", torch.zeros(0, 3))
        self._register_load_state_dict_pre_hook(lambda *_: None)  # type: ignore[no-untyped-call]
        self.register_state_dict_post_hook(self._split)  # type: ignore[no-untyped-call]

    @staticmethod
    def _split(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
        whole = state.pop(prefix + "qkv").detach()
        for index, name in enumerate("qkv"):
            state[prefix + name] = whole[2 * index : 2 * index + 2]

    def get_extra_state(self) -> Any:
        return {"note": [1, 2]}

    def set_extra_state(self, state: Any) -> None:
        pass

    def state_dict(self) -> Any:  # type: ignore[override]
        found = super().state_dict()
        return {"model": {key: found[key] for key in found if not key.startswith("frozen")}}


def test_a_state_dict_that_only_renames_is_accepted() -> None:
    module = Renaming()
    assert saves_its_own(module)
    assert list(Tree({"model": module}).names) == ["model"]


class FusedQKVLinear(nn.Module):
    """Like torchtitan's, recognised by its name: its state_dict has copies of a parameter's parts."""

    def __init__(self, *more: str) -> None:
        super().__init__()
        self.wqkv, self.more = nn.Linear(2, 6), more
        self.register_state_dict_post_hook(self._split_qkv_on_save)  # type: ignore[no-untyped-call]

    @staticmethod
    def _split_qkv_on_save(module: Any, state: Any, prefix: str, metadata: Any) -> None:
        for name in ("weight", "bias"):
            parts = state.pop(f"{prefix}wqkv.{name}").chunk(3)
            state.update({f"{prefix}w{key}.{name}": part.clone() for key, part in zip("qkv", parts)})  # noqa: B905
        state.update({prefix + name: torch.zeros(1) for name in module.more})


FusedQKVLinear.__module__ = "torchtitan.models.common.attention"


def test_split_parameters_of_known_modules_are_accepted() -> None:
    model = nn.Sequential(FusedQKVLinear())
    saved = capture(Tree({"model": model})).saved()
    assert {"model.0.wqkv.weight", "model.0.wqkv.bias"} <= saved.leaves.keys()
    with pytest.raises(StateError, match="own code or a hook"):
        Tree({"model": nn.Sequential(FusedQKVLinear("scale"))})
    # In an unknown module, the same could be an average of the parameters.
    other = type("Averaged", (FusedQKVLinear,), {"__module__": "elsewhere"})
    with pytest.raises(StateError, match="own code or a hook"):
        Tree({"model": nn.Sequential(other())})


def test_data_of_another_named_object_is_accepted() -> None:
    model = nn.Linear(2, 1)
    shadow = Shadow(model)
    assert list(Tree({"shadow": shadow, "average": shadow.average}).names) == ["shadow", "average"]


def wrapped() -> list[nn.Module]:
    lazy = nn.LazyLinear(3)
    lazy(torch.zeros(1, 2))
    return [
        lazy,
        parametrizations.weight_norm(nn.Linear(2, 2)),
        parametrizations.spectral_norm(nn.Linear(2, 2)),
        parametrizations.orthogonal(nn.Linear(2, 2)),
        torch.nn.utils.spectral_norm(nn.Linear(2, 2)),
        torch.optim.swa_utils.AveragedModel(nn.BatchNorm1d(2), use_buffers=True),
        torch.compile(nn.Linear(2, 2)),  # type: ignore[list-item]
        nn.DataParallel(nn.Linear(2, 2)),
        nn.MultiheadAttention(4, 2),
        torch.ao.quantization.prepare_qat(  # type: ignore[no-untyped-call]
            nn.Sequential(nn.Linear(2, 2)).train().requires_grad_(True), inplace=False
        ),
    ]


@pytest.mark.filterwarnings("ignore")
def test_torchs_own_modules_and_wrappers_are_accepted() -> None:
    for module in wrapped():
        assert list(Tree({"model": nn.Sequential(module)}).names) == ["model"]


def test_a_parameter_named_like_extra_state_is_restored() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._extra_state_proj = nn.Linear(2, 2)
            self.seen = torch.zeros(2)

        def get_extra_state(self) -> Any:
            return {"proj": self.seen}

        def set_extra_state(self, state: Any) -> None:
            self.seen = state["proj"]

    model = Odd()
    tree = Tree({"m": nn.Sequential(model)})
    with torch.no_grad():
        model._extra_state_proj.weight.fill_(7)
    model.seen += 3
    image = capture(tree)
    other = Odd()
    again = Tree({"m": nn.Sequential(other)})
    filled = dict(again.restore(image.saved()))
    assert filled.keys() == image.saved().leaves.keys()
    assert other._extra_state_proj.weight.tolist() == [[7, 7], [7, 7]]
    assert other.seen.tolist() == [3, 3]
    narrow = copy.deepcopy(other)
    narrow._extra_state_proj = nn.Linear(3, 2)
    rows = Tree({"m": nn.Sequential(narrow)}).differences(image.saved())
    assert [row[0] for row in rows] == ["m.0._extra_state_proj.weight"]


def test_requires_grad_is_restored() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    tree = Tree({"m": model})
    walk = tree.walk(all_used_up)
    model.bias.requires_grad_(False)
    image = Image.of(walk, tree.values())  # it changed after the walk
    other.weight.requires_grad_(False)
    Tree({"m": other}).restore(image.saved())
    assert (other.weight.requires_grad, other.bias.requires_grad) == (True, False)
