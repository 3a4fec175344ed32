"""flashckpt: checkpoints that cost a training loop nothing."""
