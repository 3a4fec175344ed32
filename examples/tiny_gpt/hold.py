"""Holds a training process still in the middle of a step, for the demo to kill it there.

Owns a hook in the backward pass, and the commit before it; without them nothing of the training changes.
"""

from __future__ import annotations

import os
import threading

from torch import nn

import flashckpt


def hold_in_backward(block: nn.Module, step: int, *, after: int, report_fd: int) -> None:
    """In the backward pass of step `step` (the first is 1), write "STEP" to `report_fd` and never return.
    `after`: the steps that were done before this process began.

    At that moment the step has half of its gradients, and nothing of it has reached the optimizer.
    """
    backwards = after

    def hook(*_: object) -> None:
        nonlocal backwards
        backwards += 1
        if backwards == step:
            os.write(report_fd, f"{step}\n".encode())
            threading.Event().wait()

    block.register_full_backward_hook(hook)


def commit_before(step: int, checkpointer: flashckpt.Checkpointer) -> None:
    """To be called in each iteration: commit a step before the one that is held. The demo's steps are so few
    that on a busy machine none may be taken by then."""
    if checkpointer.completed == step - 3:
        checkpointer.save()
    elif checkpointer.completed == step - 2:
        checkpointer.wait()
