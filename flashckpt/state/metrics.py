"""What a metric of torchmetrics holds: its states are plain attributes, neither parameters nor buffers.

Owns which attributes those are (as of torchmetrics 1.9). Attributes that configure a metric are the
program's, and stay as it built them. Never imports torchmetrics.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn

from flashckpt.format.typed import SEQUENCES, children
from flashckpt.state.values import SIMPLE

_KINDS = ("Metric", "MetricCollection")
# Of all metrics; of MetricCollection; of Running and MinMaxMetric.
_ATTRIBUTES = (
    "_update_count", "_computed", "_forward_cache", "_is_synced", "_cache",
    "_groups_checked", "_groups", "_state_is_copy",
    "_num_vals_seen", "min_val", "max_val",
)  # fmt: skip


def is_metric(module: nn.Module) -> bool:
    """Whether a module is a metric, or a collection of them."""
    package = sys.modules.get("torchmetrics")
    kinds = tuple(getattr(package, name) for name in _KINDS if hasattr(package, name))
    return isinstance(module, kinds)


def metric_state(module: Any) -> dict[str, Any]:
    """What a metric holds beside its inner metrics. Its tensors are those that it holds, but for tensors with
    a gradient's history: those are detached."""
    states = {name: _detached(getattr(module, name)) for name in getattr(module, "_defaults", ())}
    held = vars(module)
    names = [name for name in _ATTRIBUTES if name in held and name not in states]
    # A result may be of any type. Without it, the metric computes it again.
    attributes = {name: _detached(held[name]) if _is_plain(held[name]) else None for name in names}
    return {"states": states, "attributes": attributes}


def put_metric_state(module: Any, state: dict[str, Any]) -> None:
    """Give a metric what `metric_state` returned. Raises ValueError for the state of another metric."""
    here = set(getattr(module, "_defaults", ()))
    if state["states"].keys() != here:
        raise ValueError(
            f"a {type(module).__name__} has the states {sorted(here)}, and the checkpoint has "
            f"{sorted(state['states'])}"
        )
    for name, value in {**state["attributes"], **state["states"]}.items():
        setattr(module, name, value)


def _is_plain(value: Any) -> bool:
    if type(value) in SIMPLE or isinstance(value, Tensor):
        return True
    return type(value) in (dict, *SEQUENCES) and all(_is_plain(item) for _, item in children(value))


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach() if value.requires_grad else value
    if type(value) is dict:
        return {key: _detached(item) for key, item in value.items()}
    return type(value)(map(_detached, value)) if type(value) in (list, tuple) else value
