"""Modules: names without wrappers, ties, buffers of all kinds, layouts, dtypes, extra state, subclasses."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from flashckpt.errors import DamagedError, StateError
from flashckpt.state.tensors import TORCH_DTYPES, bits, register_tensor_class
from flashckpt.state.tree import Tree
from tests.state.image import (
    Image,
    all_used_up,
    assert_same,
    capture,
    check_continues,
    contents,
    raw_bytes,
    restore,
)


def names(tree: Tree) -> dict[str, tuple[str, ...]]:
    return {leaf.name: leaf.aliases for leaf in tree.walk(all_used_up).leaves}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


def test_tied_weights_are_stored_once_and_stay_tied() -> None:
    model = Tied()
    tree = Tree({"model": model})
    assert names(tree) == {"model.embed.weight": ("model.head.weight",)}
    image = capture(tree)
    other = Tied()
    restore(Tree({"model": other}), image)
    assert other.head.weight is other.embed.weight
    assert torch.equal(other.head.weight, model.embed.weight)


def test_a_tie_on_one_side_only_is_a_difference() -> None:
    tied, apart = Tied(), Tied()
    apart.head.weight = nn.Parameter(apart.embed.weight.detach().clone())
    assert Tree({"model": apart}).differences(capture(Tree({"model": tied})).saved()) == [
        ("model.head.weight", "one tensor with model.embed.weight", "a tensor of its own")
    ]
    assert Tree({"model": tied}).differences(capture(Tree({"model": apart})).saved()) == [
        ("model.head.weight", "a tensor of its own", "one tensor with model.embed.weight")
    ]


def test_one_module_under_two_names_and_tied_by_memory_alone() -> None:
    model = nn.Linear(3, 2)
    model.register_buffer("same", model.weight.data)
    tree = Tree({"a": model, "b": model})
    assert names(tree)["a.weight"] == ("a.same", "b.weight", "b.same")
    image = capture(tree)
    with torch.no_grad():
        model.weight.zero_()
    restore(tree, image)
    assert_same(tree, Tree({"a": model, "b": model}))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_wrappers_leave_no_trace_in_names() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Sequential(nn.Linear(2, 2)))
    plain = names(Tree({"model": model}))
    wrapped = torch.compile(model)
    assert names(Tree({"model": wrapped})) == plain
    model[1] = torch.compile(model[1])
    assert names(Tree({"model": nn.DataParallel(model)})) == plain
    restore(Tree({"model": wrapped}), capture(Tree({"model": model})))


def test_a_child_that_is_only_called_like_a_wrapper_keeps_its_name() -> None:
    class Owner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 2)
            self.weight = nn.Parameter(torch.zeros(1))

    assert set(names(Tree({"m": Owner()}))) == {"m.weight", "m.module.weight", "m.module.bias"}


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_dtype_and_special_bits() -> None:
    model = nn.Module()
    generator = torch.Generator().manual_seed(0)
    for name, dtype in TORCH_DTYPES.items():
        raw = torch.randint(0, 256, (3 * torch.empty(0, dtype=dtype).element_size(),), generator=generator)
        raw = raw.to(torch.uint8)  # bool too: a byte of 2 is true, and copies between bools make it 1
        model.register_buffer("many_" + name, raw.view(dtype))
        model.register_buffer("one_" + name, raw.clone().view(dtype)[0])
    model.register_buffer("nan", torch.tensor([0x7FA00001, -1], dtype=torch.int32).view(torch.float32))
    tree = Tree({"model": model})
    image = capture(tree)
    before = contents(tree)
    with torch.no_grad():
        for buffer in model.buffers():
            bits(buffer).zero_()
    assert contents(tree) != before
    restore(tree, image)
    assert contents(tree) == before


def odd_tensors() -> dict[str, Tensor]:
    base = torch.arange(48, dtype=torch.float32)
    return {
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3.5),
        "channels_last": base.view(1, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        "transposed": base.view(6, 8).t(),
        "every_second": base[::2],
        "middle": torch.arange(1000.0)[400:410],
        "expanded": torch.tensor([1.0, 2.0]).view(2, 1).expand(2, 5),
        "one": torch.empty_strided((1, 3, 1), (7, 1, 5)).fill_(2.0),
    }


def module_of(tensors: dict[str, Tensor]) -> nn.Module:
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor)
    return module


def test_views_store_their_own_elements_and_layouts_stay() -> None:
    model = module_of(odd_tensors())
    tree = Tree({"m": model})
    image = capture(tree)
    sizes = {leaf.name: leaf.num_bytes for leaf in image.layout.leaves}
    assert sizes["m.middle"] == 40
    assert sizes["m.empty"] == 0
    other = module_of(odd_tensors())
    for name in ("scalar", "channels_last", "transposed", "middle", "one"):
        getattr(other, name).fill_(-1)
    strides = {name: buffer.stride() for name, buffer in other.named_buffers()}
    again = Tree({"m": other})
    restore(again, image)
    assert_same(tree, again)
    assert {name: buffer.stride() for name, buffer in other.named_buffers()} == strides


def test_non_persistent_buffers_are_restored() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()), persistent=False)
            self.register_buffer("filled_later", None)
            self.register_buffer("cache", torch.zeros(2), persistent=False)

        def forward(self) -> None:
            self.seen += 1
            self.filled_later = torch.ones(3)
            self.cache = torch.ones(7)
            self.register_buffer("late", torch.ones(1), persistent=False)

    model = Counting()
    model()
    tree = Tree({"m": model})
    image = capture(tree)
    other = Counting()
    again = Tree({"m": other})
    restore(again, image)
    assert_same(tree, again)
    assert other.seen.item() == 1
    assert other.cache.tolist() == [1.0] * 7
    assert other.filled_later.tolist() == [1.0] * 3
    assert set(other.state_dict()) == set(model.state_dict())


def test_batch_norm_and_average() -> None:
    def build(seed: int) -> tuple[Tree, nn.Module, Any, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
        average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return Tree({"model": model, "optimizer": optimizer, "ema": average}), model, average, optimizer

    def train(model: nn.Module, average: Any, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
            model(x).square().mean().backward()
            optimizer.step()
            with torch.no_grad():
                model[0].weight.clamp_(-0.3, 0.3)
            average.update_parameters(model)

    check_continues(build, train)


def test_parametrizations_frozen_weights_and_complex() -> None:
    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.LSTM(3, 2))
        parametrizations.weight_norm(model[0])
        parametrizations.spectral_norm(model[1])
        model[2].requires_grad_(False)
        model.register_parameter("wave", nn.Parameter(torch.randn(2, dtype=torch.complex64)))
        return model

    model = build(0)
    tree, again = Tree({"m": model}), Tree({"m": build(1)})
    assert parametrize.is_parametrized(model[0])
    restore(again, capture(tree))
    assert_same(tree, again)


def test_extra_state_with_tensors_and_integer_keys() -> None:
    class Extra(nn.Module):
        def __init__(self, value: Any) -> None:
            super().__init__()
            self.value = value

        def get_extra_state(self) -> Any:
            return copy.deepcopy(self.value)

        def set_extra_state(self, state: Any) -> None:
            self.value = state

    model = nn.Sequential(Extra({1: torch.ones(2), "n": (1, 2.5)}), nn.Linear(2, 2))
    tree = Tree({"m": model})
    assert any(leaf.container is None for leaf in tree.walk(all_used_up).leaves)
    model[0].value[1] = torch.full((2,), 4.0)
    model[0].value["n"] = (2, 3.5)
    image = Image.of(tree.current or tree.walk(all_used_up), tree.values())
    other = nn.Sequential(Extra({1: torch.zeros(2), "n": ()}), nn.Linear(2, 2))
    restore(Tree({"m": other}), image)
    assert other[0].value["n"] == (2, 3.5)
    assert other[0].value[1].tolist() == [4.0, 4.0]


class Pair(torch.Tensor):
    """Wraps two tensors and represents their sum."""

    @staticmethod
    def __new__(cls, a: Tensor, b: Tensor, scale: float) -> "Pair":
        return torch.Tensor._make_wrapper_subclass(cls, a.shape, dtype=a.dtype, requires_grad=False)

    def __init__(self, a: Tensor, b: Tensor, scale: float) -> None:
        self.a, self.b, self.scale = a, b, scale

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["a", "b"], {"scale": self.scale}

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> "Pair":
        return cls(inner["a"], inner["b"], context["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(str(func))


def test_subclasses_are_taken_apart_and_filled_in_place() -> None:
    model = nn.Module()
    model.register_buffer("pair", Pair(torch.ones(2), torch.zeros(3), 0.5))
    tree = Tree({"m": model})
    assert set(names(tree)) == {"m.pair.a", "m.pair.b"}
    image = capture(tree)
    model.pair.a.fill_(7)
    pair = model.pair
    restore(tree, image)
    assert model.pair is pair
    assert pair.a.tolist() == [1.0, 1.0]


def test_only_known_subclasses_are_created() -> None:
    held: dict[str, Any] = {"pair": Pair(torch.ones(2), torch.zeros(3), 0.5)}
    image = capture(Tree({"held": held}))
    fresh: dict[str, Any] = {}
    kind = f"{Pair.__module__}.Pair"
    assert Tree({"held": fresh}).differences(image.saved()) == [("held.pair", kind, "an unknown class")]
    register_tensor_class(Pair)
    restore(Tree({"held": fresh}), image)
    assert type(fresh["pair"]) is Pair
    assert fresh["pair"].scale == 0.5
    assert fresh["pair"].a.tolist() == [1.0, 1.0]


def test_a_name_of_two_tensors_is_refused() -> None:
    model = nn.Module()
    model.inner = nn.Module()
    model.inner.register_buffer("x", torch.zeros(1))
    model.register_module("_wrapper", nn.DataParallel(nn.Linear(1, 1)))
    model._wrapper.register_parameter("weight", nn.Parameter(torch.ones(1)))
    with pytest.raises(StateError, match="is the name of two tensors") as caught:
        Tree({"m": model})
    assert caught.value.location == "m._wrapper.weight"


def refused() -> dict[str, nn.Module]:
    def buffer(tensor: Tensor) -> nn.Module:
        module = nn.Module()
        module.register_buffer("bad", tensor)
        return module

    inside = nn.Module()
    inside.bad = nn.Module()
    inside.bad.bad = inside
    return {
        "sparse": buffer(torch.eye(3).to_sparse()),
        "csr": buffer(torch.eye(3).to_sparse_csr()),
        "meta": buffer(torch.empty(3, device="meta")),
        "quantized": buffer(torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)),
        "nested": buffer(torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])),
        "overlapping": buffer(torch.ones(6).as_strided((3, 3), (1, 1))),
        "conjugate": buffer(torch.ones(2, dtype=torch.complex64).conj()),
        "negative": buffer(torch.ones(2, dtype=torch.complex64).conj().imag),
        "lazy": nn.LazyLinear(3),
        "cycle": inside,
    }


@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_saved_exactly_is_refused_with_its_place() -> None:
    for case, module in refused().items():
        with pytest.raises(StateError, match="cannot be saved exactly") as caught:
            Tree({"model": nn.Sequential(module)})
        place = {"lazy": "weight", "cycle": "bad.bad"}.get(case, "bad")
        assert caught.value.location == f"model.0.{place}", case


def test_a_fake_tensor_is_refused() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        model = nn.Linear(2, 2)
    with pytest.raises(StateError, match="fake"):
        Tree({"model": model})


def test_a_snapshot_with_a_missing_leaf_changes_nothing() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    tree = Tree({"m": model, "o": optimizer})
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    saved = capture(tree).saved()
    leaves = {k: v for k, v in saved.leaves.items() if k != "o.state.m.weight.exp_avg"}
    with torch.no_grad():
        model.weight.add_(1)
    moved = raw_bytes(model.weight)
    with pytest.raises(DamagedError):
        tree.restore(type(saved)(leaves, saved.value, saved.tensor))
    assert raw_bytes(model.weight) == moved
