"""Run a module with a test's packages beside the installed ones: `python -m tests.contracts.beside FOLDER
MODULE ARGUMENTS`. FOLDER may be ""."""

from __future__ import annotations

import runpy
import sys

if __name__ == "__main__":
    _, folder, module, *arguments = sys.argv
    sys.path[:0] = [folder] if folder else []
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)
