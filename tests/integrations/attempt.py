"""`python -m tests.integrations.attempt TASK`: one attempt of a case; see job.py."""

import importlib
import logging
import os
import sys
import warnings

import torch

from tests.integrations import data
from tests.integrations import job as jobs


def main() -> None:
    task = jobs.Task.decode(sys.argv[1])
    warnings.simplefilter("ignore")
    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(1)
    job = jobs.begin(task)
    if task.kind == jobs.KILLED:
        job.remember_checkpointer()
    job.moment(jobs.START)
    module, _, name = task.case.partition(":")
    case = getattr(importlib.import_module(module), name)
    data.seed()
    record = case(job)
    job.moment(jobs.AFTER)
    path = f"{task.files}/record-{job.rank}"
    torch.save(jobs.plain(record), f"{path}.writing")
    os.rename(f"{path}.writing", path)


if __name__ == "__main__":
    main()
