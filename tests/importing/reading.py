"""Read a source in a separate process, which a hostile source may crash: `python -m tests.importing.reading
SOURCE`."""

from __future__ import annotations

import sys

from flashckpt.importing.source import open_source, readable


def main(path: str) -> None:
    unreadable = list[str]()
    readable(open_source(path).tree, "", unreadable)
    print(*unreadable, sep="\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
