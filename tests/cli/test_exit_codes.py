"""The shell's exit codes are a promise to scripts: pinned here, and the same in docs/errors.md."""

from __future__ import annotations

import re
from pathlib import Path

from flashckpt import errors
from flashckpt.cli.command import ExitCode, exit_code

DOCUMENT = Path(__file__).parents[2] / "docs" / "errors.md"

CODES = {
    "UsageError": 2,
    "OptionError": 2,
    "StateError": 2,
    "BoundaryError": 2,
    "MismatchError": 4,
    "RunError": 3,
    "RunHeldError": 3,
    "SupersededError": 3,
    "FormatError": 3,
    "NoSuchStepError": 3,
    "UnusableRunError": 3,
    "DivergedError": 1,
    "DamagedError": 1,
    "OutOfSpaceError": 4,
    "KeeperError": 4,
    "PersistError": 4,
}


def test_every_error_has_a_pinned_code() -> None:
    public = {name for name in vars(errors) if name.endswith("Error")} - {"FlashckptError"}
    assert {name: int(exit_code(getattr(errors, name)("message"))) for name in public} == CODES


def test_codes_of_what_is_no_error_of_ours() -> None:
    assert exit_code(OSError(28, "No space left on device")) == 4
    assert exit_code(RuntimeError("a fault of our own")) == 4
    assert exit_code(KeyboardInterrupt()) == 130
    assert ExitCode.WELL == 0


def test_the_document_has_a_row_with_the_code_of_each_error() -> None:
    rows = re.findall(r"^\| [├└ ]*`(\w+)` \|.*\| (\d+) \|$", DOCUMENT.read_text(), re.MULTILINE)
    assert {name: int(code) for name, code in rows} == CODES
