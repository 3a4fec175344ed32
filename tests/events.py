"""What a run's ledger holds, and other files of lines, while processes that live go on writing them."""

import json
from pathlib import Path
from typing import Any


def whole_lines(path: Path) -> list[str]:
    """Those that are written to their end: whoever reads beside a writer may find half of the last one."""
    text = path.read_bytes()
    return text[: text.rfind(b"\n") + 1].decode().splitlines()


def ledger(run: Path) -> list[dict[str, Any]]:
    """The events of all attempts, in the order of the files' names."""
    paths = sorted((run / "events").glob("*.jsonl"))
    return [json.loads(line) for path in paths for line in whole_lines(path)]
