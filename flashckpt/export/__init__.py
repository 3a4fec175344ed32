"""Taking a step's tensors out of a run, into files that other programs read. Never writes into a run."""
