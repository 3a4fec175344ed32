"""Many ranks as one run: how they meet at `attach`, what they decide together, and what one says to all after
it."""
