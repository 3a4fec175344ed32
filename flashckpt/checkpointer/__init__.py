"""What people touch: `attach`, `loop` and the Checkpointer, and when a boundary is.

Imports nothing: a loop that is switched off does not pay for what it does not use.
"""
