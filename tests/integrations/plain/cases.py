"""The case of the harness's own test: a loop with `flashckpt.attach`, whose resume is broken."""

from typing import Any

import torch
from torch.utils.data import DataLoader

import flashckpt
from flashckpt.state import rng
from tests.integrations import data
from tests.integrations.job import BETWEEN, Job, gradients, random_numbers


def loop(job: Job) -> dict[str, Any]:
    """options: `forget`, what a resume does not bring back: "random numbers" or "counter"."""
    net = data.model()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    loader = DataLoader(data.Rows(26), 4, shuffle=True)
    own = {"iterations": 0}
    named: dict[str, Any] = {"net": net, "optimizer": optimizer}
    if job.options["forget"] == "random numbers":
        rng.restore = lambda state: None
        named["own"] = own
    with flashckpt.attach(job.run, every=1, persist_every=5, state=named) as checkpointer:
        for epoch in checkpointer.epochs(3):
            for batch in checkpointer.batches(loader):
                own["iterations"] += 1
                job.step(own["iterations"])
                job.batch(own["iterations"], batch)
                optimizer.zero_grad()
                loss = data.loss_of(net, batch)
                loss.backward()
                optimizer.step()
                job.log(own["iterations"], {"loss": loss})
            job.moment(BETWEEN)
            job.log(f"epoch {epoch}", own)
    return {
        "net": net.state_dict(), "optimizer": optimizer.state_dict(), "own": own,
        "gradients": gradients(net), "random": random_numbers(),
    }  # fmt: skip
