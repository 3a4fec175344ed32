"""One training, in a process of its own, that stands still whenever a block of steps is done:
`python -m benchmarks.trainers.job JSON`. Answers go to standard output, all else to standard error.
"""

from __future__ import annotations

import os
import sys
import warnings

from benchmarks.trainers import gate as first  # noqa: F401  # when the process started
from benchmarks.trainers.settings import TrainerJob


def main() -> None:
    job = TrainerJob.loads(sys.argv[1])
    # What a library prints must not come between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    import torch

    if job.framework == "transformers":
        from benchmarks.trainers.transformers_job import train
    else:
        from benchmarks.trainers.lightning_job import train
    torch.set_num_threads(job.threads)
    torch.manual_seed(0)
    sync = torch.cuda.synchronize if job.device == "cuda" else lambda: None
    train(job, first.Gate(answers, sync))


if __name__ == "__main__":
    main()
