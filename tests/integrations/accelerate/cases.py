"""Cases of Accelerate's loop: what users write, with and without flashckpt."""

import contextlib
import importlib.metadata
import json
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader

import flashckpt
import flashckpt.accelerate
from flashckpt.checkpointer.trainer_run import check_overridden
from tests.integrations import data
from tests.integrations.job import (
    ACCUMULATION,
    BETWEEN,
    EPOCH_END,
    SAVE,
    VALIDATION,
    Job,
    gradients,
    random_numbers,
)  # fmt: skip


class Average:
    """Registered for checkpointing: a running mean of the losses."""

    def __init__(self) -> None:
        self.value, self.count = 0.0, 0

    def add(self, value: float) -> None:
        self.count += 1
        self.value += (value - self.value) / self.count

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self.count = state["value"], state["count"]


def train(job: Job) -> dict[str, Any]:
    """options: accumulated, workers, persistent, seedable, stream, dispatch, stateful, augment, epochs, rows,
    plain_loop (`flashckpt.attach` and prepared loaders), leave_after (batches of an epoch)."""
    options = job.options
    accelerator = _accelerator(options)
    net = data.model()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
    rows = data.Rows(int(options.get("rows", 26)), augment=bool(options.get("augment", True)))
    source = data.Stream(rows) if options.get("stream") else rows
    data.seed(job.rank + 1)
    loader = DataLoader(
        source,
        4,
        shuffle=None if options.get("stream") else not options.get("ordered"),
        num_workers=int(options.get("workers", 0)),
        persistent_workers=bool(options.get("persistent")),
    )
    # What a plain loop iterates over by itself is not resumed: here it has one order.
    plain_loop = bool(options.get("plain_loop"))
    held = DataLoader(data.Rows(6, name=None), 3, shuffle=not plain_loop)
    net, optimizer, loader, schedule, held = accelerator.prepare(net, optimizer, loader, schedule, held)
    average, own = Average(), {"iterations": 0, "best": 0.0}
    accelerator.register_for_checkpointing(average)
    parts = {
        "net": net, "optimizer": optimizer.optimizer, "schedule": schedule.scheduler, "average": average,
        "own": own,
    }  # fmt: skip
    limit = int(options.get("leave_after", 1 << 30))
    with _run(job, accelerator, own, parts) as run:
        job.continues(own["iterations"])
        epochs = int(options.get("epochs", 3))
        for epoch in range(epochs) if run is None else run.epochs(epochs):
            for index, batch in enumerate(loader) if run is None else run.enumerate(loader):
                loss = _step(job, accelerator, net, optimizer, schedule, batch, own)
                average.add(loss)
                if index + 1 == limit:
                    break
            job.moment(BETWEEN)
            _validate(job, net, held, own)
            if not plain_loop:
                accelerator.save_state(str(job.folder / f"epoch-{epoch}-{job.rank}"))
                job.moment(SAVE)
            job.log(f"epoch {epoch}", {"best": own["best"], "average": average.value})
            job.moment(EPOCH_END)
    bare = accelerator.unwrap_model(net)
    return {
        "net": bare.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict(),
        "own": own, "average": average.state_dict(), "gradients": gradients(bare), "random": random_numbers(),
        "accelerator": None if plain_loop else [accelerator.step, loader.iteration, held.iteration],
        "saved": sorted(each.name for each in job.folder.glob(f"epoch-*-{job.rank}")),
    }  # fmt: skip


def _accelerator(options: dict[str, Any]) -> Accelerator:
    return Accelerator(
        cpu=True,
        gradient_accumulation_steps=int(options.get("accumulated", 1)),
        dataloader_config=DataLoaderConfiguration(
            use_seedable_sampler=bool(options.get("seedable")),
            use_stateful_dataloader=bool(options.get("stateful")),
            dispatch_batches=options.get("dispatch"),
        ),
    )


def _run(job: Job, accelerator: Accelerator, own: dict[str, Any], parts: dict[str, Any]) -> Any:
    if not job.flashckpt:
        return contextlib.nullcontext()
    if job.options.get("plain_loop"):
        return flashckpt.attach(job.run, every=1, persist_every=5, state=parts)
    return flashckpt.accelerate.attach(accelerator, job.run, state={"own": own}, every=1, persist_every=5)


def _step(
    job: Job, accelerator: Accelerator, net: Any, optimizer: Any, schedule: Any, batch: Any, own: Any
) -> float:
    own["iterations"] += 1
    number = own["iterations"]
    job.step(number)
    job.batch(number, batch)
    with accelerator.accumulate(net):
        loss = data.loss_of(net, batch)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(net.parameters(), 1.0)
        else:
            job.moment(ACCUMULATION)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    job.log(number, {"loss": loss})
    return float(loss.item())


def _validate(job: Job, net: Any, held: Any, own: dict[str, Any]) -> None:
    with torch.no_grad():
        for batch in held:
            job.moment(VALIDATION)
            own["best"] = max(own["best"], float(data.loss_of(net, batch)))


def several(job: Job) -> dict[str, Any]:
    """Two models, two optimizers, a scaler, and two loaders, whose epochs take turns."""
    accelerator = _accelerator(job.options)
    accelerator.scaler = torch.amp.GradScaler("cpu", growth_interval=3)
    nets = [data.model(), data.model()]
    optimizers = [torch.optim.SGD(net.parameters(), 1e-2, momentum=0.9) for net in nets]
    loaders = [DataLoader(data.Rows(14), 4, shuffle=True) for _ in nets]
    nets = [accelerator.prepare(net) for net in nets]
    optimizers = [accelerator.prepare(optimizer) for optimizer in optimizers]
    loaders = [accelerator.prepare(loader) for loader in loaders]
    own = {"iterations": 0}
    with _run(job, accelerator, own, {}) as run:
        for epoch in range(6) if run is None else run.epochs(6):
            net, optimizer, loader = (each[epoch % 2] for each in (nets, optimizers, loaders))
            for batch in loader if run is None else run.batches(loader):
                own["iterations"] += 1
                job.step(own["iterations"])
                job.batch(own["iterations"], batch)
                with accelerator.accumulate(net):
                    accelerator.backward(data.loss_of(net, batch))
                    optimizer.step()
                    optimizer.zero_grad()
            job.log(f"epoch {epoch}", {"noise": torch.rand(())})
            job.moment(EPOCH_END)
    return {
        "nets": [net.state_dict() for net in nets], "own": own, "random": random_numbers(),
        "optimizers": [each.state_dict() for each in optimizers], "scaler": accelerator.scaler.state_dict(),
    }  # fmt: skip


def rows(job: Job) -> dict[str, Any]:
    """Two epochs over 40 numbered rows; each attempt's batches, with their iteration, are in its folder.
    options: dispatch."""
    accelerator = _accelerator({"seedable": True, "dispatch": job.options.get("dispatch")})
    net = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), 1e-4)
    loader = DataLoader(torch.arange(40.0).reshape(40, 1), 4, shuffle=True)
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    own = {"iterations": 0}
    with _run(job, accelerator, own, {}) as run:
        for epoch in run.epochs(2):
            for batch in run.batches(loader):
                own["iterations"] += 1
                if own["iterations"] == 2:
                    run.save()
                elif own["iterations"] == 3:
                    run.wait()  # another number of ranks continues from storage
                job.step(own["iterations"])
                with open(job.folder / f"rows-{job.task.attempt}-{job.rank}", "a") as given:
                    print(json.dumps([epoch, own["iterations"], batch.flatten().tolist()]), file=given)
                accelerator.backward(net(batch).mean())
                optimizer.step()
                optimizer.zero_grad()
    return own


def names(job: Job) -> dict[str, Any]:
    """The release of the job's options is used, and has the names that flashckpt relies on."""
    release = importlib.metadata.version("accelerate").rpartition(".")[0]
    assert release == job.options["release"]
    assert release in flashckpt.accelerate.TESTED
    check_overridden("accelerate", "accelerate", flashckpt.accelerate.TESTED, flashckpt.accelerate.OVERRIDDEN)
    return {}
