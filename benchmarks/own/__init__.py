"""What only flashckpt is asked: one process each, `python -m benchmarks.own.NAME JOB`. `figures` starts them
and says which of the figures to reach were reached.
"""
