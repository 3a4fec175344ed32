"""The shell as a program: `python -m tests.contracts.shell ARGUMENTS`."""

from flashckpt.cli.main import main

if __name__ == "__main__":
    main()
