"""The morning after: what survived a crash, saved; what is damaged, marked; what is debris, cleared.

Works beside no job: who holds the run is found first, and everybody else is kept out. Imports no torch.
"""
