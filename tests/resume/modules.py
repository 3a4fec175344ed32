"""Modules that wrap, tie or compute what they hold, each a recipe that records every tensor to the bit."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, spectral_norm
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import flashckpt
from tests.resume.recipes import Hold, Record, held_loss

STEPS = 7


def body() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 4))


class Squared(nn.Module):
    """Gives the loss."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        squared: Tensor = self.inner(x).square().mean()
        return squared


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner, self.head = nn.Embedding(4, 4), body(), nn.Linear(4, 4, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.inner(x + self.embed(x.argmax(1))))
        return logits


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).T

    def right_inverse(self, x: Tensor) -> Tensor:
        return x.triu()


def distributed() -> nn.Module:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    return nn.parallel.DistributedDataParallel(Squared(body()))


def compiled() -> nn.Module:
    wrapped: Any = torch.compile(Squared(body()), backend="eager")
    return wrapped  # type: ignore[no-any-return]


def parametrized() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 4))
    parametrize.register_parametrization(model[0], "weight", Symmetric())
    parametrizations.orthogonal(model[2])  # type: ignore[no-untyped-call,unused-ignore]
    parametrizations.weight_norm(model[3])  # type: ignore[no-untyped-call,unused-ignore]
    return Squared(model)


def averaged() -> nn.Module:
    return AveragedModel(Squared(body()), multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)


def spectral() -> nn.Module:
    """Both kinds: power iterations move buffers in each forward pass."""
    newer = parametrizations.spectral_norm(nn.Linear(6, 4))
    return Squared(nn.Sequential(spectral_norm(nn.Linear(4, 6)), nn.Tanh(), newer))


def tied() -> nn.Module:
    return Squared(Tied())


def bits(*modules: nn.Module) -> list[str]:
    """Every parameter and buffer."""
    tensors = [t for module in modules for t in (*module.parameters(), *module.buffers())]
    return [t.detach().numpy().tobytes().hex() for t in tensors]


def train(
    make: Callable[[], nn.Module], record: Record, hold: Hold, path: str, options: dict[str, Any]
) -> None:
    held = make()
    # An average is not trained itself.
    trained = copy.deepcopy(held.module) if isinstance(held, AveragedModel) else held
    optimizer = torch.optim.AdamW(trained.parameters(), lr=0.05)
    named = {"model": held, "optimizer": optimizer} | ({} if trained is held else {"trained": trained})
    inputs = [torch.randn(5, 4, generator=torch.Generator().manual_seed(n)) for n in range(STEPS)]
    with flashckpt.attach(path, state=named, **options) as run:
        for x in run.batches(inputs):
            loss = held_loss(trained, x, hold, run.completed)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if isinstance(held, AveragedModel):
                held.update_parameters(trained)
            record(run, [float(loss.detach()).hex(), *bits(held, trained)])


RECIPES = {
    make.__name__: functools.partial(train, make)
    for make in (distributed, compiled, parametrized, averaged, spectral, tied)
}
