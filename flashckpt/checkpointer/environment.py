"""What of this process's surroundings can change numbers, and the one line that says it has changed."""

from __future__ import annotations

import platform
from typing import Any

import torch

from flashckpt.events import log
from flashckpt.options import Environment


def describe_environment(environment: Environment) -> dict[str, Any]:
    """Plain values, saved with each snapshot."""
    cuda = torch.cuda.is_available()
    return {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if cuda else platform.machine(),
        "devices": torch.cuda.device_count() if cuda else 0,
        "world": environment.world,
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul_precision": torch.get_float32_matmul_precision(),
    }


def log_differences(saved: object, environment: Environment) -> None:
    """One line naming what is no longer as it was. Such a run goes on exactly from its state; its
    further numbers may differ."""
    if not isinstance(saved, dict):
        return
    now = describe_environment(environment)
    changed = [
        f"{key} {saved[key]!r} -> {now[key]!r}" for key in now if key in saved and saved[key] != now[key]
    ]
    if changed:
        log.warning("resumed in another environment, numbers may differ from here on: %s", ", ".join(changed))
