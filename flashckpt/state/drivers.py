"""What drives an attached optimizer without being named: schedulers, and optimizers run inside backward.

Owns refusing them before anything is saved: their position would be lost without a word.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from flashckpt.errors import StateError

_SEARCH_LEVELS = 4


def unwrapped(target: Any) -> Any:
    """The torch optimizer inside a wrapper that is no scheduler (`accelerate`'s), else the object itself."""
    while not isinstance(target, LRScheduler) and hasattr(target, "param_groups"):
        inner = getattr(target, "optimizer", None)
        if not isinstance(inner, Optimizer) or inner is target:
            break
        target = inner
    return target


def check_schedulers(named: Mapping[str, object], optimizers: Mapping[str, Optimizer]) -> None:
    """Raise StateError for a scheduler that is bound to a named optimizer and is itself not named."""
    driven = {name: o for name, o in optimizers.items() if hasattr(o.step, "_wrapped_by_lr_sched")}
    if not driven:
        return
    reached = {id(s) for target in named.values() for s in _schedulers_in(target, _SEARCH_LEVELS)}
    if _unnamed(driven, reached):
        gc.collect()  # one that is only part of a garbage cycle is not used any more
    for name, scheduler in _unnamed(driven, reached):
        kind = type(scheduler).__name__
        raise StateError(
            f"The optimizer {name!r} is driven by a {kind} that is not part of the state: after a resume its "
            "learning rate would start over. Nothing was saved or changed. Name it: add the keyword "
            f"scheduler=<the {kind}> (any name will do), or delete it if it is not used any more.",
            location=name,
        )


def _unnamed(driven: Mapping[str, Optimizer], reached: set[int]) -> list[tuple[str, LRScheduler]]:
    names = {id(optimizer): name for name, optimizer in driven.items()}
    alive = [thing for thing in gc.get_objects() if issubclass(type(thing), LRScheduler)]
    bound = [(names[id(o)], s) for s in alive if id(o := unwrapped(getattr(s, "optimizer", None))) in names]
    return [(name, scheduler) for name, scheduler in bound if id(scheduler) not in reached]


def _schedulers_in(target: object, levels: int) -> Iterator[LRScheduler]:
    """Schedulers that an object is or holds: SequentialLR and ChainedScheduler hold others."""
    if isinstance(target, LRScheduler):
        yield target
    if levels == 0 or isinstance(target, (Tensor, nn.Module, Optimizer, str, bytes, type)):
        return
    for item in _parts(target):
        yield from _schedulers_in(item, levels - 1)


def _parts(target: object) -> Iterable[object]:
    if isinstance(target, Mapping):
        return list(target.values())
    if isinstance(target, (list, tuple, set, frozenset)):
        return target if len(target) <= 1000 else ()
    return list(getattr(target, "__dict__", {}).values())


def check_backward_optimizers(
    parameters: Iterable[tuple[str, Tensor]], optimizers: Iterable[Optimizer]
) -> None:
    """Raise StateError for optimizers that run inside backward and are not named."""
    named = {id(optimizer) for optimizer in optimizers}
    for name, parameter in parameters:
        for optimizer in getattr(parameter, "_in_backward_optimizers", ()):
            if id(optimizer) not in named:
                raise StateError(
                    f"{name} is stepped inside backward by a {type(optimizer).__name__} that is not part of "
                    "the state: its momenta would be lost. Nothing was saved or changed. Name every such "
                    "optimizer: state={'backward.0': …}, or step the optimizers in the loop.",
                    location=name,
                )
