"""What people touch: `attach`, `loop` and the Checkpointer, and when a boundary is.

    attach.py         what a script calls; disabled.py is what it gets where the library is switched off
    session.py        the claim on the run, the life lock, the keeper
    resume.py         what `attach` does once: restore the newest state, start all that runs beside the loop
    checkpointer.py   the Checkpointer and its iterators; attached_run.py: how a loop and a run end
    boundaries.py     what is done at a boundary; progress.py: how far the run has come
    slots.py          memory for snapshots: asked for, adopted, let go
    attendant.py      the background thread and who waits for it; run_log.py: what it tells
    signals.py        what asks a loop to end

Imports nothing: a loop that is switched off does not pay for what it does not use.
"""
