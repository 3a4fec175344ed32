"""The shell: `flashckpt ls | show | verify | branch | recover | prune | export RUN`.

Owns what people type and read. Reaches runs through the layers below and never opens a file of a run itself;
imports no torch (but for an export in torch's own format), so that it answers at once on machines without it.
"""
