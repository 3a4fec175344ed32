"""The keeper: the node's background process of a run, and the client through which a trainer asks it.

It never imports torch, never runs in the training process, and never stops training: it counts, reports and
retries what fails.
"""
