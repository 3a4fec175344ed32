"""`flashckpt import`: makes a run from the checkpoint of another library. Runs no code from the
checkpoint."""
