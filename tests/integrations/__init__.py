"""flashckpt inside the frameworks that people use."""
