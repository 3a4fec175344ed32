"""What a module saves beyond parameters, buffers and extra state, by overriding `state_dict` or by hooks.

Owns finding it when the state is attached, and refusing it: it would come back as it was built. A
`state_dict` that only renames, hides or nests what is saved anyway is let through. Never copies a leaf.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from flashckpt.state.leaves import LiveLeaf
from flashckpt.state.subclasses import is_wrapper
from flashckpt.state.survey import join
from flashckpt.state.tensors import refuse, span

_EXTRA = "_extra_state"
_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks")
_REMEDY = (
    "Make it a buffer, give the module get_extra_state and set_extra_state, or name what holds it as an "
    "object of its own beside the module (anything with state_dict and load_state_dict)."
)


class LeafMemory:
    """The memory of all leaves of a state, and the tensors that they were found as."""

    def __init__(self, leaves: Iterable[LiveLeaf], modules: Iterable[nn.Module]) -> None:
        self._ids = {id(t) for module in modules for t in (*module.parameters(), *module.buffers())}
        self._spans: dict[tuple[object, int], list[tuple[int, int]]] = {}
        self._empty: set[tuple[object, object]] = set()
        for leaf in leaves:
            self._ids.add(id(leaf.tensor))
            if leaf.tensor.numel() == 0:
                self._empty.add((leaf.tensor.shape, leaf.tensor.dtype))
            self._spans.setdefault(_storage(leaf.tensor), []).append(span(leaf.tensor))

    def holds(self, tensor: Tensor) -> bool:
        """Whether all elements of a tensor are in the memory of one leaf."""
        if id(tensor) in self._ids:
            return True
        if is_wrapper(tensor):
            return all(isinstance(part, Tensor) and self.holds(part) for part in _parts(tensor))
        if tensor.numel() == 0:
            return (tensor.shape, tensor.dtype) in self._empty
        start, end = span(tensor)
        return start < end and any(a <= start and end <= b for a, b in self._spans.get(_storage(tensor), ()))


def _storage(tensor: Tensor) -> tuple[object, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()


def _parts(tensor: Tensor) -> Iterator[object]:
    if hasattr(tensor, "_local_tensor"):
        yield tensor._local_tensor
        return
    for attribute in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
        yield getattr(tensor, attribute)


def check_own_saving(modules: Mapping[str, nn.Module], leaves: Iterable[LiveLeaf]) -> None:
    """Raise StateError for a module (path -> module) whose `state_dict` holds what no leaf holds."""
    suspects = [(path, module) for path, module in modules.items() if saves_its_own(module)]
    if not suspects:
        return
    held = LeafMemory(leaves, modules.values())
    for path, module in reversed(suspects):  # the inner ones first: theirs is the path to name
        if any(_is_gathered(inner) for inner in module.modules()):
            continue
        for key, value in _state_of(module, path).items():
            lost = _first_lost(value, str(key), held)
            if lost is not None:
                why = f"is put into the state_dict of a {type(module).__name__} by its own code or a hook"
                refuse(join(path, lost), f"{why}, and is neither parameter, buffer nor extra state", _REMEDY)


def saves_its_own(module: nn.Module) -> bool:
    """Whether a module's own code, or a hook that is not torch's, has a part in its `state_dict`."""
    kind = type(module)
    if kind._save_to_state_dict is not nn.Module._save_to_state_dict:
        return True
    if "state_dict" in vars(module) or not _is_torchs(kind.state_dict):
        return True
    return any(not _is_torchs(hook) for name in _HOOKS for hook in getattr(module, name, {}).values())


def _is_torchs(function: Any) -> bool:
    if type(function).__name__ == "_WrappedHook":
        function = function.hook
    while isinstance(function, functools.partial):
        function = function.func
    home = getattr(function, "__module__", None) or type(function).__module__
    return home == "torch" or home.startswith("torch.")


def _is_gathered(module: nn.Module) -> bool:
    """FSDP1: its state_dict is made of all ranks' parts, and no tensor in it is one of ours."""
    return any(
        kind.__name__ == "FullyShardedDataParallel" and _is_torchs(kind) for kind in type(module).__mro__
    )


def _state_of(module: nn.Module, path: str) -> Mapping[Any, Any]:
    method = module.state_dict
    try:
        inspect.signature(method).bind(keep_vars=True)
        takes_keep_vars = True
    except (TypeError, ValueError):
        takes_keep_vars = False
    try:
        found: Any = method(keep_vars=True) if takes_keep_vars else method()
    except Exception as error:
        why = f"has a state_dict of its own that fails ({type(error).__name__}: {error})"
        refuse(path, why, "Let it return what is to be saved.")
    if not isinstance(found, Mapping):
        refuse(path, f"has a state_dict that gives a {type(found).__name__}", "Let it return a dict.")
    return found


def _first_lost(value: object, name: str, held: LeafMemory) -> str | None:
    """The name of the first part of a state_dict's value that no leaf holds."""
    if isinstance(value, Tensor):
        return None if held.holds(value) else name
    if name.split(".")[-1] == _EXTRA:
        return None
    items: Iterable[tuple[object, object]]
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, (list, tuple)) and value:
        items = enumerate(value)
    else:
        return name
    for key, item in items:
        lost = _first_lost(item, join(name, key), held)
        if lost is not None:
            return lost
    return None
