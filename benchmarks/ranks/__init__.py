"""What a checkpoint of several ranks costs, under flashckpt and its peers: `make bench ARGS="--ranks 2,4"`.

`jobs` starts torchrun for each measurement, `rank` is one of its ranks, `table` says what was found.
"""

KINDS = {"fsdp2": "FSDP2: each rank its rows", "ddp": "DDP: each rank the whole"}
"""How the model of a job is divided."""
