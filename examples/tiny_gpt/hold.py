"""Pauses a training process in the middle of a step, where the demo kills it.

Owns a hook in the backward pass and a commit before it. Does not change the training otherwise.
"""

from __future__ import annotations

import os
import threading

from torch import nn

import flashckpt


def hold_in_backward(block: nn.Module, step: int, *, after: int, report_fd: int) -> None:
    """In the backward pass of step `step` (from 1), write "STEP" to `report_fd` and never return. `after`:
    number of steps done before this process started.

    At that moment the step has half of its gradients, and the optimizer has used none of them.
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
    """Commit a step before the paused step; call it in each iteration. The demo has so few steps that on a
    busy machine none may be committed by then."""
    if checkpointer.completed == step - 3:
        checkpointer.save()
    elif checkpointer.completed == step - 2:
        checkpointer.wait()
