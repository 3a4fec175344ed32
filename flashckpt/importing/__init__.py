"""`flashckpt import`: the checkpoint of another library becomes a new run. Runs no code of what it reads."""
