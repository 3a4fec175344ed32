"""Measures flashckpt against its peers: one training loop, one process a peer, the machine's limits beside."""
