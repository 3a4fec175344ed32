"""Read a source in a separate process, which a hostile source may crash: `python -m tests.importing.reading
SOURCE`."""

from __future__ import annotations

import sys

from flashckpt.importing.source import Unreadable, items, open_source


def main(path: str) -> None:
    for name, value in items(open_source(path).tree):
        print(name, value.why if type(value) is Unreadable else "")


if __name__ == "__main__":
    main(*sys.argv[1:])
