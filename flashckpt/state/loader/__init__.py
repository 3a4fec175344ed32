"""The program's data loader, with a position that is saved at any boundary and resumed exactly."""
