"""The steps of a run in more than one store: copied from one to another, byte for byte."""
