"""Recovery by hand: save what survived a crash, quarantine damaged steps, remove orphans. Imports no
torch."""
