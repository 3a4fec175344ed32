"""Persisting steps: from sealed slots, or from parts at rest, to committed steps, and what may go afterwards.

The keeper runs these jobs while a run is trained, `flashckpt recover` after a crash. Never imports torch.
"""
