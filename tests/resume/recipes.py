"""Training recipes, each a small script of the kind people write. Every random source is used.

A recipe is a function (record, hold, path, options) that trains through flashckpt. `record(run, value)`
writes one line under the run's step; `hold(step)` may be called anywhere inside an iteration and stands
still in the one where the kill is to come.
"""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import flashckpt

Record = Callable[[Any, object], None]
Hold = Callable[[int], None]


class Noisy(Dataset[Any]):
    """Items that draw from all three random sources, in whichever process loads them."""

    def __init__(self, items: int = 24) -> None:
        self.data = torch.randn(items, 6, generator=torch.Generator().manual_seed(7))

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> torch.Tensor:
        jitter = torch.rand(()) + random.random() + float(np.random.rand())
        return self.data[index] + 0.01 * jitter


class Net(nn.Module):
    """Dropout (random numbers), BatchNorm (buffers), a tied weight and a max_norm embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6, max_norm=1.0)
        self.inner = nn.Linear(6, 12)
        self.norm = nn.BatchNorm1d(12)
        self.drop = nn.Dropout(0.3)
        self.outer = nn.Linear(12, 6)
        self.tied = nn.Linear(6, 11, bias=False)
        self.tied.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = (x[:, 0].abs() * 5).long() % 11
        hidden = self.drop(torch.relu(self.norm(self.inner(x + self.embed(ids)))))
        return self.tied(self.outer(hidden)).square().mean() + hidden.sum() * 1e-3


def seed() -> None:
    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(3)


def held_loss(net: nn.Module, x: torch.Tensor, hold: Hold, step: int) -> torch.Tensor:
    """A loss whose backward pass stands still in the step where the kill is to come."""
    loss: torch.Tensor = net(x)
    if loss.requires_grad:
        loss.register_hook(lambda _: hold(step))
    return loss


def drain(net: nn.Module, loss: torch.Tensor) -> list[str]:
    """The loss and every weight, to the bit."""
    weights = torch.cat([p.detach().double().flatten() for p in net.parameters()])
    return [float(loss.detach()).hex(), float(weights.sum()).hex(), float(weights.norm()).hex()]


def plain(record: Record, hold: Hold, path: str, options: dict[str, Any]) -> None:
    """One loop over several epochs, shuffled, no workers, a schedule by step."""
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=60)
    loader = DataLoader(Noisy(), batch_size=4, shuffle=True)
    batches = flashckpt.loop(
        loader, path, epochs=3, model=net, optimizer=optimizer, scheduler=scheduler, **options
    )
    for x in batches:
        loss = held_loss(net, x, hold, batches.completed)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        record(batches, drain(net, loss))


def workers(record: Record, hold: Hold, path: str, options: dict[str, Any]) -> None:
    """Persistent workers, zero_grad that leaves zeros, gradients clipped, an EMA teacher."""
    net = Net()
    teacher = torch.optim.swa_utils.AveragedModel(
        net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
    loader = DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=2, persistent_workers=True)
    batches = flashckpt.loop(
        loader, path, steps=17, model=net, optimizer=optimizer, teacher=teacher, **options
    )
    for x in batches:
        optimizer.zero_grad(set_to_none=False)
        loss = held_loss(net, x, hold, batches.completed)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        teacher.update_parameters(net)
        record(batches, drain(teacher.module, loss))


def epochs(record: Record, hold: Hold, path: str, options: dict[str, Any]) -> None:
    """Code between epochs: a schedule by epoch, and a validation that draws random numbers."""
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01, amsgrad=True)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2], gamma=0.3)
    loader = DataLoader(Noisy(), batch_size=6, shuffle=True, num_workers=1)
    with flashckpt.attach(path, model=net, optimizer=optimizer, scheduler=scheduler, **options) as run:
        for epoch in run.epochs(3):
            for x in run.batches(loader):
                loss = held_loss(net, x, hold, run.completed)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                record(run, drain(net, loss))
            scheduler.step()
            hold(run.completed)
            record(run, [f"epoch {epoch}", torch.rand(()).item().hex(), scheduler.get_last_lr()])


def accumulation(record: Record, hold: Hold, path: str, options: dict[str, Any]) -> None:
    """Gradients accumulated in one optimizer while another steps at a different rate; weights clipped."""
    net, other = Net(), nn.Linear(6, 6)
    fast = torch.optim.RMSprop(other.parameters(), lr=0.01, momentum=0.5)
    slow = torch.optim.NAdam(net.parameters(), lr=0.01)
    loader = DataLoader(Noisy(), batch_size=3, shuffle=True)
    batches = flashckpt.loop(loader, path, epochs=2, model=net, other=other, fast=fast, slow=slow, **options)
    for x in batches:
        loss = held_loss(net, other(x), hold, batches.completed)
        loss.backward()
        fast.step()
        fast.zero_grad()
        if batches.completed % 4 == 3:
            slow.step()
            slow.zero_grad()
        with torch.no_grad():
            for p in other.parameters():
                p.clamp_(-0.5, 0.5)
        record(batches, drain(net, loss) + drain(other, loss))


def amp(record: Record, hold: Hold, path: str, options: dict[str, Any]) -> None:
    """Autocast with a GradScaler that skips steps when it finds inf, and frozen weights."""
    net = Net()
    net.inner.requires_grad_(False)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**19, growth_interval=3)
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.01)
    loader = DataLoader(Noisy(), batch_size=4, shuffle=True)
    batches = flashckpt.loop(loader, path, epochs=2, model=net, optimizer=optimizer, scaler=scaler, **options)
    for x in batches:
        with torch.autocast("cpu", torch.float16):
            loss = net(x)
        scaled = scaler.scale(loss)
        scaled.register_hook(lambda _, step=batches.completed: hold(step))
        scaled.backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        record(batches, [*drain(net, loss), float(scaler.get_scale())])


def closure(record: Record, hold: Hold, path: str, options: dict[str, Any]) -> None:
    """LBFGS: state that grows from step to step, and a closure that is called several times."""
    torch.use_deterministic_algorithms(True)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=4, history_size=5)
    loader = DataLoader(Noisy(), batch_size=8, shuffle=True)
    batches = flashckpt.loop(loader, path, epochs=4, model=net, optimizer=optimizer, **options)
    for x in batches:
        hold(batches.completed)

        def evaluate(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            return loss

        loss = optimizer.step(evaluate)
        record(batches, drain(net, loss))


def marked(record: Record, hold: Hold, path: str, options: dict[str, Any]) -> None:
    """A loop that cannot be rewritten: boundaries marked by hand, data from the run's own numbers."""
    net = Net()
    optimizer = torch.optim.Adagrad(net.parameters(), lr=0.05)
    with flashckpt.attach(path, state={"net": net, "the optimizer": optimizer}, **options) as run:
        while run.completed < 12:
            x = torch.randn(4, 6) + random.random() + float(np.random.rand())
            loss = held_loss(net, x, hold, run.completed)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            record(run, drain(net, loss))
            run.step()
        run.save()


RECIPES = {f.__name__: f for f in (plain, workers, epochs, accumulation, amp, closure, marked)}
