"""A life of the training of the kill tests, as a program.

`python -m tests.crash.trainer train ARGUMENTS-JSON` trains (the arguments are of `tiny.train`);
`python -m tests.crash.trainer reference STEPS` prints the digests of a plain loop as JSON.
"""

import json
import os
import sys

import torch

from tests.crash import tiny


def main() -> None:
    what, about = sys.argv[1], json.loads(sys.argv[2])
    torch.set_num_threads(1)
    if what == "reference":
        print(json.dumps(tiny.reference(about)))
        return
    tiny.train(**about)
    # The loop has closed its run. Whatever else an interpreter does at its end takes longer than the life.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
