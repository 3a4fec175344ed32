"""`python -m benchmarks`: what `make bench` calls."""

from benchmarks.run import app

app()
