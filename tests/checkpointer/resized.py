"""A trainer of which one leaf's storage is resized in the third iteration: `resized LEAF HOW RUN`. It prints
why it was refused, then the newest sealed step before and after, and the boundaries passed."""

import os
import sys

import torch
from torch import nn

import flashckpt
from tests.waiting import until_slots


def resized(tensor: torch.Tensor, how: str) -> None:
    storage = tensor.untyped_storage()
    if how == "gone":
        storage.resize_(0)
    elif how == "swapped":
        other = torch.zeros(tensor.numel() + tensor.storage_offset(), dtype=tensor.dtype)
        tensor.data = other.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        other.untyped_storage().resize_(tensor.element_size() * 4)
    elif how == "grown again":
        # Most likely the memory that it had before: nothing but its size tells it.
        size = storage.nbytes()
        storage.resize_(0)
        storage.resize_(size - 64)
    else:
        storage.resize_(storage.nbytes() - 64)


def leaf(model: nn.Sequential, optimizer: torch.optim.Optimizer, kind: str) -> torch.Tensor:
    weight = model[0].weight
    return {
        "model.0.weight": weight,
        "model.table": model.table,
        "model.view": model.view,
        "optimizer.state.model.0.weight.exp_avg": optimizer.state[weight]["exp_avg"],
    }[kind]


def main(kind: str, how: str, run: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    model.register_buffer("table", torch.zeros(1 << 18))
    model.register_buffer("view", torch.zeros(1 << 18)[1 << 17 :])
    optimizer = torch.optim.Adam(model.parameters())
    with flashckpt.attach(run, every=1, model=model, optimizer=optimizer) as checkpointer:
        try:
            for x in checkpointer.batches([torch.randn(2, 256)] * 6):
                if checkpointer.completed == 4:
                    break  # torch would read it, too
                until_slots(checkpointer)
                optimizer.zero_grad()
                model[1](model[0](x)).sum().backward()
                optimizer.step()
                if checkpointer.completed == 3:
                    sealed = checkpointer.report()["newest_sealed_step"]
                    resized(leaf(model, optimizer, kind), how)
            checkpointer.wait()
        except flashckpt.StateError as error:
            print(error)
        print(sealed, checkpointer.report()["newest_sealed_step"], checkpointer.completed)
        sys.stdout.flush()
        os._exit(0)  # the state stays as it is: closing could say it only once more


if __name__ == "__main__":
    main(*sys.argv[1:])
