"""The trainer: `attach`, `loop`, the Checkpointer, and the life cycle of a run.

    attach.py         what a script calls, and what it gets if the library is switched off
    resume.py         what `attach` does once: restore the newest state, start all that runs beside the loop
    session.py        the attempt, its life lock, the keeper, one run for all ranks
    run.py            the Checkpointer and its iterators: the states of a run (run_state.py), its ends
    capture_loop.py   boundaries: counted, captured if due or ordered, their outcome
    progress.py       step, epoch and position; whether they are true
    unnamed.py        objects with a state that no name covers
    slots.py          memory for snapshots: requested, adopted, released
    keeper_link.py    the background thread, and the trainer's waits for the keeper; run_log.py: what it logs
    signals.py        what asks a loop to end
    trainer_run.py    the interface for trainers with their own loop

Imports nothing, so that a loop that is switched off loads only what it uses.
"""
