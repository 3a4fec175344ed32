"""Names of parametrised tests that are the same in every process."""

import re


def shown(value: object) -> str:
    """The value's repr without addresses."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
