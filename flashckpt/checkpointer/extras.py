"""The optional packages of the integrations: how a missing one is reported, and one that has changed."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import logging
from collections.abc import Iterator, Mapping
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
    extra: str,
    package: str,
    tested: tuple[str, ...],
    overridden: Mapping[str, tuple[str, ...] | None],
) -> None:
    """Check the names of a framework that an integration calls or replaces.

    package: the distribution. tested: its releases ("1.15" is any 1.15.x). overridden: by
    "module:Class.function" the names of its parameters, `self` included; None where it need only be there.

    Raises OptionError, with each name that is missing or takes other parameters. Warns, once in a process,
    where the release is not among `tested`.
    """
    version = importlib.metadata.version(package)
    changed = list(_changes(overridden))
    if changed:
        raise OptionError(
            f"{package} {version} is not the one that flashckpt.{extra} knows: {'; '.join(changed)}. Nothing "
            f"was started. Install a release of {package} {' or '.join(tested)}, or a newer flashckpt."
        )
    if not any(version == each or version.startswith(f"{each}.") for each in tested):
        _warn_untested(extra, package, version, tested)


def _changes(overridden: Mapping[str, tuple[str, ...] | None]) -> Iterator[str]:
    """What is missing, or takes other parameters."""
    for name, expected in overridden.items():
        module, _, path = name.partition(":")
        try:
            found: Any = functools.reduce(getattr, path.split("."), importlib.import_module(module))
        except (ImportError, AttributeError):
            yield f"{path} of {module} is missing"
            continue
        if expected is None:
            continue
        try:
            parameters = tuple(inspect.signature(found).parameters)
        except (TypeError, ValueError):
            yield f"{path} of {module} is not a function any more"
            continue
        if parameters != expected:
            yield f"{path} of {module} takes ({', '.join(parameters)}) and not ({', '.join(expected)})"


@functools.cache
def _warn_untested(extra: str, package: str, version: str, tested: tuple[str, ...]) -> None:
    log.warning(
        "flashckpt.%s is tested with %s %s, and not with %s: all the functions that it relies on are there, "
        "but whether a resume is exact is not known.",
        extra, package, " and ".join(tested), version,
    )  # fmt: skip
