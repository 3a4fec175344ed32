"""Measures flashckpt against its peers: one loop, one process a peer, the machine's limits beside."""
