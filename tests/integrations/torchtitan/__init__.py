"""torchtitan's components in a training loop. Importing this package does not import torchtitan."""

STEPS = 18
