"""Cases of the harness's own test: a plain loop of torch, and the same with `flashckpt.attach`."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler

import flashckpt
from tests.integrations import data
from tests.integrations.job import (
    ACCUMULATION,
    BETWEEN,
    EPOCH_END,
    VALIDATION,
    Job,
    gradients,
    random_numbers,
)

EPOCHS, ACCUMULATED = 3, 2


def loop(job: Job) -> dict[str, Any]:
    """Accumulation, workers, validation at each epoch's end. options: `forget` breaks the resume."""
    data.seed()
    net = data.model()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    loader = DataLoader(data.Rows(26), 4, shuffle=True, num_workers=int(job.options.get("workers", 0)))
    own = {"iterations": 0, "best": 0.0}
    if job.options.get("forget") == "random numbers":
        from flashckpt.state import rng

        rng.restore = lambda state: None
    named = {"net": net, "optimizer": optimizer, "schedule": schedule, "own": own}
    if job.options.get("forget") == "counter":
        del named["own"]
    with contextlib.ExitStack() as stack:
        checkpointer = None
        if job.flashckpt:
            checkpointer = stack.enter_context(
                flashckpt.attach(job.run, every=1, persist_every=5, state=named)
            )
        for epoch in range(EPOCHS) if checkpointer is None else checkpointer.epochs(EPOCHS):
            for batch in loader if checkpointer is None else checkpointer.batches(loader):
                own["iterations"] += 1
                _train(job, net, optimizer, schedule, batch, own)
            job.moment(BETWEEN)
            with torch.no_grad():
                job.moment(VALIDATION)
                own["best"] = max(own["best"], float(data.loss_of(net, torch.randn(6, 8))))
            job.log(f"epoch {epoch}", own)
            job.moment(EPOCH_END)
    return {
        "net": net.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict(),
        "own": own, "gradients": gradients(net), "random": random_numbers(),
    }  # fmt: skip


def _train(
    job: Job, net: Any, optimizer: Any, schedule: Any, batch: torch.Tensor, own: dict[str, Any]
) -> None:
    number = own["iterations"]
    job.step(number)
    job.batch(number, batch)
    loss = data.loss_of(net, batch)
    loss.backward()
    job.log(number, {"loss": loss})
    if number % ACCUMULATED:
        job.moment(ACCUMULATION)
    else:
        optimizer.step()
        optimizer.zero_grad()
    schedule.step()


def ranks(job: Job) -> dict[str, Any]:
    """Data-parallel training on gloo, with a sampler that divides the rows."""
    torch.distributed.init_process_group("gloo")
    data.seed()
    net = torch.nn.parallel.DistributedDataParallel(data.model())
    data.seed(job.rank + 1)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    rows = data.Rows(24)
    loader = DataLoader(rows, 4, sampler=DistributedSampler(rows))
    own = {"iterations": 0}
    named = {"net": net, "optimizer": optimizer, "own": own}
    with contextlib.ExitStack() as stack:
        checkpointer = None
        if job.flashckpt:
            checkpointer = stack.enter_context(
                flashckpt.attach(job.run, every=1, persist_every=5, state=named)
            )
        for epoch in range(EPOCHS) if checkpointer is None else checkpointer.epochs(EPOCHS):
            loader.sampler.set_epoch(epoch)
            for batch in loader if checkpointer is None else checkpointer.batches(loader):
                own["iterations"] += 1
                job.step(own["iterations"])
                job.batch(own["iterations"], batch)
                optimizer.zero_grad()
                data.loss_of(net, batch).backward()
                job.moment(ACCUMULATION)
                optimizer.step()
            job.moment(EPOCH_END)
    record = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "random": random_numbers()}
    # Before its process group: torch's reducer can wait for ever where it is freed after that.
    del net, named
    gc.collect()
    torch.distributed.destroy_process_group()
    return record
