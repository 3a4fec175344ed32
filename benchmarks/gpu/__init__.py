"""`make gpu`: all that only a machine with a GPU can say, in one command and within minutes.

What is imported by `__main__` needs an interpreter and no package: it runs before anything is built.
"""
