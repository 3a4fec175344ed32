"""The training state: tensors, values, random number generators, the loader's position, and the restore."""
