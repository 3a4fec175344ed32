"""Texts of a foreign checkpoint on a terminal: shown as they are, and obeyed by nothing."""

import os
import pty
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from made_runs import MadeRun, Shell, held

from flashckpt.errors import DamagedError
from flashckpt.format.names import CommitName
from flashckpt.persist.ledger import Event, Ledger
from tests import run_view

# Clears the screen, colours, sets the title, reorders, rings, moves back; and rich's own markup.
EVIL = "e\x1b[2J\x1b[31m\x1b]0;title\x07\x9b31m\u202egnp\x7f\r\x08[red]vil[/red]"
# What a line may hold but for the colours that the command itself sets.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
OWN_STYLES = re.compile("\x1b\\[[0-9;]*m")

pytestmark = pytest.mark.process


@pytest.fixture
def hostile(run: MadeRun) -> MadeRun:
    """A run with such texts wherever a record has a free one."""
    attempt = run.attempt()
    run.commit(attempt, 1)
    leaf = held(f"{EVIL}.weight", np.arange(4, dtype="uint8"), f"{EVIL}.tied")
    part = run.publish(attempt, 2, {0: [leaf]}, 1, {"torch": EVIL, f"{EVIL}-name": "1"})
    run_view.commit(run.store, part.id)
    for step, host in ((1, f"host {EVIL}"), (2, run_view.this_host())):
        run_view.mark_damaged(run.store, CommitName(step, attempt, step), host, f"reason {EVIL}")
    (run.of(attempt, 1) / f".{EVIL.replace('/', '')}.tmp").write_bytes(b"")
    ledger = Ledger(run.store)
    for event in (Event.RESUME, Event.TIMES):
        ledger.add(str(attempt), event, step=2, rank=0, host=EVIL, tier=EVIL, from_attempt=str(attempt))
    ledger.close()
    return run


COMMANDS = [
    ["ls"], ["ls", "--all"], ["show", "2"], ["verify"], ["recover", "--dry-run"], ["export", "OUT"],
    ["copy", "OUT"], ["branch", "2"], ["prune", "--keep-last", "2"], ["show", "2", "--rank", "0"],
]  # fmt: skip


def test_no_text_of_a_checkpoint_commands_a_terminal(hostile: MadeRun, shell: Shell, tmp_path: Path) -> None:
    for command in COMMANDS:
        name, *more = [str(tmp_path / f"{command[0]}{EVIL}") if each == "OUT" else each for each in command]
        ended = shell(name, hostile.folder, *more)
        for text in (ended.out, ended.err):
            assert not CONTROL.search(text), ascii(text)
        if name in ("show", "ls"):
            assert "\\x1b[2J" in ended.out, "it is shown all the same"
            assert "[red]vil[/red]" in re.sub(r"\s", "", ended.out)
    ended = shell("show", hostile.folder, "2", "--json")
    assert not CONTROL.search(ended.out)
    assert [leaf["name"] for leaf in ended.json["leaves"]] == [f"{EVIL}.weight"], "JSON is exact"
    assert str(DamagedError(EVIL)) == str(DamagedError(str(DamagedError(EVIL))))
    assert not CONTROL.search(str(DamagedError(EVIL)))


def test_on_a_terminal_the_only_escapes_are_its_own_colours(hostile: MadeRun) -> None:
    parent, child = pty.openpty()
    code = "from flashckpt.cli.main import main; main()"
    pid = os.posix_spawn(
        sys.executable, [sys.executable, "-c", code, "show", str(hostile.folder), "2"],
        {**os.environ, "COLUMNS": "200", "TERM": "xterm-256color"},
        file_actions=[(os.POSIX_SPAWN_DUP2, child, each) for each in (0, 1, 2)],
    )  # fmt: skip
    os.close(child)
    found = b""
    try:
        while chunk := os.read(parent, 65536):
            found += chunk
    except OSError:
        pass  # the other side was closed
    os.close(parent)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    text = found.decode().replace("\r\n", "\n")
    assert OWN_STYLES.search(text), "a terminal has colours"
    assert not CONTROL.search(OWN_STYLES.sub("", text)), ascii(text)
    assert "\\x1b[31m" in text
