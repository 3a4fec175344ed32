"""Masks secrets and escapes control characters in text that is printed or logged.

Owns both rules. Untrusted texts (names, reasons and hosts in a checkpoint, a server's answer) pass through
here before they reach a terminal or a log. JSON output needs none of it: JSON escapes control characters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

# C0 except tab and line feed, DEL, C1, and the marks that reorder the text after them.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")

# User and password of a URL. One slash suffices, since `pathlib.Path` removes the other. Keys may contain
# slashes; text after a port is a path.
_USER = re.compile(r"""(?<=:/)(/?)(?:[^\s/'"?#:]*:(?!\d+/)[^\s'"?#]*|[^\s/'"?#]*)@""")
_PARAMETER = re.compile(
    r"""([?&;][^\s=&;?'"]{0,64}(?:sig|token|key|secret|password|credential)[^\s=&;?'"]{0,64}=)[^\s&;'"]+""",
    re.IGNORECASE,
)
_SECRET_OPTION = re.compile(
    "key(?!_id)|secret|token|passw|passphrase|sas|credential|header|proxy", re.IGNORECASE
)
_FILE_OPTION = re.compile("(file|filename|path)$", re.IGNORECASE)
_LEAST_SECRET_CHARS = 4  # masking shorter values would hide parts of words
_MASK = "***"
_MOST_CHARS = 8192
"""Longest text that is masked. Masking takes quadratic time and holds the GIL, and a server may answer with
megabytes."""


def escaped(text: str) -> str:
    """Replace control characters and bidirectional marks by escapes (`\\x1b`). Keep tabs and line feeds."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def listed(names: Sequence[str], most: int = 8) -> str:
    """a, b and 3 more"""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def redacted(text: str, options: Mapping[str, object] | None = None) -> str:
    """Mask user and password of each URL, parameters that sign a request, and secret values among a store's
    options. Truncate a long text before a word, because half a secret would not be recognized."""
    for name, value in (options or {}).items():
        is_secret = _SECRET_OPTION.search(name) and not _FILE_OPTION.search(name)
        if is_secret and isinstance(value, str) and len(value) >= _LEAST_SECRET_CHARS:
            text = text.replace(value, _MASK)
    if len(text) > _MOST_CHARS:
        text = text[:_MOST_CHARS].rpartition(" ")[0] + " …"
    return _PARAMETER.sub(rf"\1{_MASK}", _USER.sub(rf"\1{_MASK}@", text))


def cause(error: BaseException, options: Mapping[str, object] | None = None) -> BaseException | None:
    """Return `error` for use in `raise … from`, or None if its text or that of an earlier error in its chain
    has a secret or a control character or is too long: a traceback prints texts unmasked."""
    each: BaseException | None = error
    while each is not None:
        if escaped(redacted(str(each), options)) != str(each):
            return None
        each = each.__cause__ or each.__context__
    return error
