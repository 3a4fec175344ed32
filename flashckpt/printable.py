"""Text for people: without secrets, and without characters that a terminal obeys.

Owns both rules. Other people's texts (names, reasons and hosts in a checkpoint, a server's answer) pass
through here before they reach a terminal or a log; JSON escapes by itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

# C0 but for tab and line feed, DEL, C1, and the marks that reorder the text after them.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")

# Of a URL. One slash alone: `pathlib.Path` takes the other away. Keys have slashes in them, too; what stands
# behind a port is a path.
_USER = re.compile(r"""(?<=:/)(/?)(?:[^\s/'"?#:]*:(?!\d+/)[^\s'"?#]*|[^\s/'"?#]*)@""")
_PARAMETER = re.compile(
    r"""([?&;][^\s=&;?'"]{0,64}(?:sig|token|key|secret|password|credential)[^\s=&;?'"]{0,64}=)[^\s&;'"]+""",
    re.IGNORECASE,
)
_SECRET_OPTION = re.compile(
    "key(?!_id)|secret|token|passw|passphrase|sas|credential|header|proxy", re.IGNORECASE
)
_FILE_OPTION = re.compile("(file|filename|path)$", re.IGNORECASE)
_LEAST_SECRET_CHARS = 4  # a shorter one would mask parts of words
_MASK = "***"
_MOST_CHARS = 8192
"""Of a text that is masked. The time that it takes grows with the square of the text, other threads stand
still meanwhile, and a server may answer with megabytes."""


def escaped(text: str) -> str:
    """Show control characters and bidirectional marks as escapes (`\\x1b`). Tabs and line feeds stay."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def redacted(text: str, options: Mapping[str, object] | None = None) -> str:
    """Mask the user and the password of each URL, parameters that sign a request, and the values of a
    store's options that are secret. Cut a long text in front of a word: half a secret would not be known."""
    for name, value in (options or {}).items():
        is_secret = _SECRET_OPTION.search(name) and not _FILE_OPTION.search(name)
        if is_secret and isinstance(value, str) and len(value) >= _LEAST_SECRET_CHARS:
            text = text.replace(value, _MASK)
    if len(text) > _MOST_CHARS:
        text = text[:_MOST_CHARS].rpartition(" ")[0] + " …"
    return _PARAMETER.sub(rf"\1{_MASK}", _USER.sub(rf"\1{_MASK}@", text))


def cause(error: BaseException, options: Mapping[str, object] | None = None) -> BaseException | None:
    """The error, to raise another from it; None where its text, or that of an error before it, has a secret
    or a control character, or is too long to tell: a traceback prints it as it is."""
    each: BaseException | None = error
    while each is not None:
        if escaped(redacted(str(each), options)) != str(each):
            return None
        each = each.__cause__ or each.__context__
    return error
