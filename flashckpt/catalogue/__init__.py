"""The state of a run on storage: one numbered catalogue, and the protocol by which processes change it.

changes.py has the changes, as pure functions; versions.py creates versions from them; home.py commits,
starts, branches, rebuilds and deletes; mirror.py copies to a second store.
"""
