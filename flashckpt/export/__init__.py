"""Exports a step's tensors to files for other programs. Never writes into a run."""
