"""A file whose appearance says that this machine is about to go. Owns what was there before."""

from __future__ import annotations

import os

from flashckpt.events import log


class NoticeFile:
    """Tells a notice from one that was there already: a leftover must not end each restart's first step."""

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self.path = None if path is None else os.fspath(path)
        self._before = self._identity()
        if self._before is not None:
            log.warning(
                "the notice file %s is there already and is taken for an old one: only one that is made or "
                "written from now on ends the loop",
                self.path,
            )

    def __bool__(self) -> bool:
        return self.path is not None

    def has_come(self) -> bool:
        """Whether a file is there that was not, or not so, in the beginning."""
        now = self._identity()
        return now is not None and now != self._before

    def _identity(self) -> tuple[int, int, int] | None:
        if self.path is None:
            return None
        try:
            found = os.stat(self.path)
        except OSError:
            return None
        return found.st_dev, found.st_ino, found.st_mtime_ns
