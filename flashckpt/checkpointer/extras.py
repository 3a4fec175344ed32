"""The optional packages of the integrations: how a missing one is reported, and one that has changed."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import logging
from collections.abc import Mapping
from typing import Any

from flashckpt.errors import OptionError

log = logging.getLogger(__name__)


def require(extra: str, *modules: str) -> None:
    """Raise OptionError, with the command that installs them, where a top-level module is missing."""
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        raise OptionError(
            f"flashckpt.{extra} needs {' and '.join(missing)}, which this environment does not have. Nothing "
            f"was started. Run: pip install 'flashckpt[{extra}]'"
        )


def check_overridden(
    extra: str, package: str, tested: tuple[str, ...], overridden: Mapping[str, tuple[str, ...]]
) -> None:
    """Raise OptionError where the installed release of a framework lacks a function that an integration calls
    or replaces, or has it with other parameters. overridden: "module:Class.function" and the parameters'
    names. Warn, once for each process, where the release is none of `tested` (as "1.15")."""
    version = importlib.metadata.version(package)
    changed = [name for name, parameters in overridden.items() if _parameters(name) != parameters]
    if changed:
        raise OptionError(
            f"{package} {version} has no {', '.join(changed)} with the parameters that flashckpt.{extra} "
            f"relies on. Nothing was started. Install a release of {package} from {tested[0]} to "
            f"{tested[-1]}."
        )
    if not any(version == each or version.startswith(f"{each}.") for each in tested):
        _warn_untested(extra, package, version, tested)


@functools.cache
def _warn_untested(extra: str, package: str, version: str, tested: tuple[str, ...]) -> None:
    log.warning(
        "flashckpt.%s is tested with %s %s, and not with %s: all the functions that it relies on are there, "
        "but whether a resume is exact is not known.",
        extra, package, " and ".join(tested), version,
    )  # fmt: skip


def _parameters(name: str) -> tuple[str, ...] | None:
    """The parameters of a function; None where there is none of that name."""
    module, _, path = name.partition(":")
    try:
        found: Any = functools.reduce(getattr, path.split("."), importlib.import_module(module))
        return tuple(inspect.signature(found).parameters)
    except (ImportError, AttributeError, TypeError, ValueError):
        return None
