"""What callers see of a run, and how it is committed. Imports neither torch nor the state layer."""
