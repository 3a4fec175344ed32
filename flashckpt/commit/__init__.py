"""Attempts, lineage, the order of writes, retention. Imports neither torch nor the state layer."""
