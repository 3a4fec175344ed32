"""The loader of the program, with a position that can be saved at any boundary and taken up again exactly."""
