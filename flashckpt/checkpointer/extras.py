"""The optional packages of the integrations: how a missing one is reported."""

from __future__ import annotations

import importlib.util

from flashckpt.errors import OptionError


def require(extra: str, *modules: str) -> None:
    """Raise OptionError, with the command that installs them, where a top-level module is missing."""
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        raise OptionError(
            f"flashckpt.{extra} needs {' and '.join(missing)}, which this environment does not have. Nothing "
            f"was started. Run: pip install 'flashckpt[{extra}]'"
        )
