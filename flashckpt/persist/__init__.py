"""Persisting steps: from sealed slots or stored parts to committed steps, and the deletions that follow.

The keeper runs these jobs while a run is trained, `flashckpt recover` after a crash. Never imports torch.
"""
