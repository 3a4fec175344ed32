"""The shell: `flashckpt ls | show | verify | branch RUN`. Owns what people type and read.

Reads runs through flashckpt.commit and never opens a file of a run itself; imports no torch, so that it
answers at once on machines that have none.
"""
