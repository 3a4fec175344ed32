"""Watch sees what version counters and identities do not."""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from array import array
from collections.abc import Callable

import pytest
import torch
from torch import nn

from flashckpt import _native


def watch_of(**tensors: torch.Tensor) -> tuple[_native.Watch, dict[str, torch.Tensor], array[int]]:
    state = dict(tensors)
    return (
        _native.Watch([(state, name) for name in state], list(state.values())),
        state,
        array("Q", [9] * len(state)),
    )


def test_nothing_changed_and_current_addresses() -> None:
    base = torch.arange(100.0)
    watch, state, out = watch_of(a=base, b=base[3:], c=torch.zeros(0), d=nn.Parameter(torch.ones(2, 3)).t())
    assert watch.changed(out) == []
    assert out.tolist() == [tensor.data_ptr() for tensor in state.values()]
    base.mul_(2)
    assert watch.changed(out) == []
    assert len(watch) == 4


@pytest.mark.parametrize(
    "change",
    [
        lambda p: setattr(p, "data", p.data.clone()),
        lambda p: setattr(p, "data", p.data.view(2, 3)),
        lambda p: setattr(p, "data", p.data.t()),
        lambda p: setattr(p, "data", p.data[:, :1]),
        lambda p: p.detach().resize_(100),
        lambda p: p.detach().set_(torch.ones(3, 2)) is None or setattr(p, "data", torch.zeros(3, 2)),
        lambda p: setattr(p, "data", p.data.double()),
    ],
)
def test_changes_that_keep_the_object(change: Callable[[torch.Tensor], object]) -> None:
    parameter = nn.Parameter(torch.ones(3, 2))
    watch, _, out = watch_of(same=torch.ones(2), p=parameter)
    change(parameter)
    assert watch.changed(out) == [1]
    assert out[1] == parameter.data_ptr()
    assert watch.changed(out) == [1]


class Other(torch.Tensor):
    pass


@pytest.mark.parametrize("kind", [torch.Tensor, nn.Parameter, Other])
@pytest.mark.parametrize("num_extents", [0, 3, 7])
def test_a_storage_that_has_shrunk(kind: type, num_extents: int) -> None:
    """Most likely where it was before, so that only its size tells. Records of tensors with many extents have
    these elsewhere."""
    tensor = torch.zeros(1 << 18)[0].view([1] * num_extents)
    if kind is nn.Parameter:
        tensor = nn.Parameter(tensor)
    if kind is Other:
        tensor = tensor.as_subclass(Other)
    watch, _, out = watch_of(same=torch.ones(2), tensor=tensor)
    storage = tensor.untyped_storage()
    size = storage.nbytes()
    assert watch.changed(out) == []
    storage.resize_(0)
    storage.resize_(size - 4)
    assert watch.changed(out) == [1]


def test_tensors_whose_records_move() -> None:
    """`torch.utils.swap_tensors` keeps the objects but exchanges their records, which may be freed."""
    state = [torch.zeros(1 << 16) for _ in range(100)]
    watch = _native.Watch([(state, i) for i in range(100)], state)
    out = array("Q", [0] * 100)
    for tensor in state:
        other = torch.zeros(1 << 16)
        torch.utils.swap_tensors(tensor, other)
        del other
    assert watch.changed(out) == list(range(100))
    assert out.tolist() == [tensor.data_ptr() for tensor in state]


def test_in_place_transposes_and_resizes_and_a_dtype_of_the_same_size() -> None:
    a, b, square, typed = torch.ones(3, 2), torch.ones(8), torch.ones(3, 3), torch.ones(4)
    watch, _, out = watch_of(a=a, b=b, square=square, typed=typed)
    a.t_()
    b.resize_(4)
    square.t_()  # the same pointer and shape
    typed.data = typed.data.view(torch.int32)
    assert watch.changed(out) == [0, 1, 2, 3]
    a.t_()
    b.resize_(8)
    square.t_()
    typed.data = typed.data.view(torch.float32)
    assert watch.changed(out) == []


def test_other_objects_in_every_kind_of_container() -> None:
    owner = nn.Linear(2, 2)
    owner.weight.grad = torch.ones(2, 2)
    listed = [torch.ones(1), torch.ones(2)]
    named = {("tuple", 1): torch.ones(3)}
    items = [(owner, "weight"), (owner.weight, "grad"), (listed, 1), (named, ("tuple", 1)), (None, None)]
    tensors = [owner.weight, owner.weight.grad, listed[1], named["tuple", 1], torch.ones(5)]
    watch, out = _native.Watch(items, tensors), array("Q", [0] * 5)
    assert watch.changed(out) == []
    other = torch.ones(2)
    listed[1] = other
    assert watch.changed(out) == [2]
    assert out[2] == other.data_ptr()
    del listed[1], named["tuple", 1]
    owner.weight.grad = None
    owner.weight = nn.Parameter(torch.ones(2, 2))
    assert watch.changed(out) == [0, 1, 2, 3]
    assert out.tolist() == [owner.weight.data_ptr(), 0, 0, 0, tensors[4].data_ptr()]


class Wrapped(torch.Tensor):
    """A subclass that says no to DLPack's C interface."""

    __dlpack_c_exchange_api__ = None


@pytest.mark.filterwarnings("ignore:torch.quantize:UserWarning")
def test_tensors_that_dlpack_does_not_describe() -> None:
    plain = torch.ones(2, 3).as_subclass(Wrapped)
    meta, sparse = torch.ones(2, 3, device="meta"), torch.eye(3).to_sparse()
    conj = torch.ones(2, dtype=torch.complex64).conj()
    quantized = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)
    watch, state, out = watch_of(plain=plain, meta=meta, sparse=sparse, conj=conj, quantized=quantized)
    assert watch.changed(out) == []
    assert out[0] == plain.data_ptr()
    plain.t_()
    meta.resize_(5)
    assert watch.changed(out) == [0, 1]
    state["sparse"] = torch.eye(3).to_sparse()
    assert watch.changed(out) == [0, 1, 2]


def test_code_that_runs_during_a_check_is_harmless() -> None:
    class Owner:
        error: BaseException = RuntimeError("no")

        @property
        def tensor(self) -> torch.Tensor:
            for call in (watch.release, lambda: watch.changed(out)):
                try:
                    call()
                except ValueError as refused:
                    heard.append("being asked" in str(refused))
            raise self.error

    out, heard = array("Q", [1]), []
    watch = _native.Watch([(Owner(), "tensor")], [torch.ones(1)])
    assert watch.changed(out) == [0]
    assert out[0] == 0
    Owner.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        watch.changed(out)
    assert heard == [True] * 4
    watch.release()


@pytest.mark.process
def test_release_and_the_garbage_collector_free_objects() -> None:
    for let_go in (lambda watch: watch.release(), lambda watch: None):
        module = nn.Linear(2, 2)
        module.watch = _native.Watch([(module, "weight")], [module.weight])  # a cycle
        seen = weakref.ref(module)
        let_go(module.watch)
        del module
        gc.collect()
        assert seen() is None


class Unseen:
    """The collector knows nothing of one without attributes: it runs while others are being cleared."""

    __slots__ = ()

    def __del__(self) -> None:
        _in_the_middle()


def _in_the_middle() -> None:
    raise AssertionError("replaced by the test")


def test_the_collector_may_clear_a_watch_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """No exception can leave a clearing: the process would end."""
    inside, go_on = threading.Event(), threading.Event()
    found: list[object] = []

    class Slow:
        armed = False

        @property
        def value(self) -> object:
            if self.armed:
                inside.set()
                assert go_on.wait(120)
            return None

    def ask_it() -> None:
        watch = ctypes.cast(address, ctypes.py_object).value  # what is being cleared is in no list
        threads.append(threading.Thread(target=lambda: found.append(watch.changed(array("Q", [0] * 3)))))
        threads[0].start()
        assert inside.wait(120)

    threads: list[threading.Thread] = []
    monkeypatch.setattr(f"{__name__}._in_the_middle", ask_it)
    gc.collect()
    gc.disable()
    try:
        slow = Slow()
        cycle: list[object] = [Unseen()]  # made first, cleared first
        cycle.append(cycle)
        watch = _native.Watch([(slow, "value"), (None, None), (None, None)], [object(), cycle, slow])
        cycle.append(watch)
        address = id(watch)
        slow.armed = True
        del cycle, watch, slow
        gc.collect()
    finally:
        gc.enable()
    assert inside.is_set(), "it was cleared before it was asked"
    go_on.set()
    threads[0].join()
    assert found == [[0]]


class Raising:
    """Stands for a tensor, or for what holds one: whatever is asked of it raises."""

    def __init__(self, error: BaseException) -> None:
        object.__setattr__(self, "error", error)

    def __getattribute__(self, name: str) -> object:
        raise object.__getattribute__(self, "error")


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, MemoryError])
def test_errors_that_end_a_program_are_raised(kind: type[BaseException]) -> None:
    with pytest.raises(kind):
        _native.Watch([(None, None)], [Raising(kind())])
    watch = _native.Watch([(Raising(kind()), "weight")], [object()])
    with pytest.raises(kind):
        watch.changed(array("Q", [0]))
    with pytest.raises(kind):
        _native.Standing([], [(Raising(kind()), "weight", None)]).stands()
    watch.release()  # it is not taken for one that is being asked


@pytest.mark.parametrize("kind", [RuntimeError, NotImplementedError, ValueError])
def test_other_errors_count_as_a_change(kind: type[Exception]) -> None:
    addresses = array("Q", [7, 7])
    watch = _native.Watch([(None, None), (Raising(kind()), "weight")], [Raising(kind()), object()])
    assert watch.changed(addresses) == [1]
    assert list(addresses) == [0, 0]
