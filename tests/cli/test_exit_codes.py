"""The shell's exit codes are a promise to scripts: docs/errors.md has the code of each error."""

import re
from pathlib import Path

from flashckpt import errors
from flashckpt.cli.command import ExitCode, exit_code

DOCUMENT = Path(__file__).parents[2] / "docs" / "errors.md"


def test_the_document_has_a_row_with_the_code_of_each_error() -> None:
    rows = re.findall(r"^\| [├└ ]*`(\w+)` \|.*\| (\d+) \|$", DOCUMENT.read_text(), re.MULTILINE)
    public = {name for name in vars(errors) if name.endswith("Error")} - {"FlashckptError"}
    codes = {name: int(exit_code(getattr(errors, name)("message"))) for name in public}
    assert codes == {name: int(code) for name, code in rows}


def test_codes_of_what_is_no_error_of_ours() -> None:
    assert exit_code(OSError(28, "No space left on device")) == 4
    assert exit_code(RuntimeError("a fault of our own")) == 4
    assert exit_code(KeyboardInterrupt()) == 130
    assert ExitCode.WELL == 0
