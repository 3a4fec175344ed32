"""Object storage: flashckpt's store beside the clients that it could be replaced by, on one real server."""
