"""The names of frameworks that integrations replace are pinned: a changed one is refused by its name."""

import importlib
import importlib.metadata
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flashckpt.checkpointer import trainer_run as extras
from flashckpt.checkpointer.trainer_run import check_overridden
from flashckpt.errors import OptionError

NAMES: dict[str, tuple[str, ...] | None] = {
    "framework_x.loop:Trainer.run": ("self", "model", "steps"),
    "framework_x.loop:skip": ("loader", "count"),
    "framework_x.loop:Trainer.done": None,
}
SOURCE = """
class Trainer:
    done = property(lambda self: True)
    def run(self, model, steps=3): ...
def skip(loader, count=0): ...
"""


@pytest.fixture
def release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Install a release of the framework."""
    monkeypatch.syspath_prepend(tmp_path)
    extras._warn_untested.cache_clear()

    def install(version: str, source: str) -> None:
        package, about = tmp_path / "framework_x", tmp_path / "framework_x.dist-info"
        for each in (package, about):
            each.mkdir()
        (package / "__init__.py").touch()
        (package / "loop.py").write_text(source)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: framework-x\nVersion: {version}\n")
        for name in ("framework_x", "framework_x.loop"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        importlib.invalidate_caches()

    return install


def check() -> None:
    check_overridden("x", "framework-x", ("1.14", "1.15"), NAMES)


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("def run", "def go", "Trainer.run of framework_x.loop is missing"),
        ("done =", "over =", "Trainer.done of framework_x.loop is missing"),
        ("def skip(loader, count=0): ...", "skip = 3", "skip of framework_x.loop is not a function"),
        ("steps=3", "more=3", r"run of .* takes \(self, model, more\) and not \(self, model, steps\)"),
    ],
)
def test_a_changed_name_is_refused(
    release: Callable[[str, str], None], old: str, new: str, named: str
) -> None:
    release("1.15.2", SOURCE.replace(old, new))
    with pytest.raises(OptionError, match=f"framework-x 1.15.2 .*{named}.*Nothing was started"):
        check()


def test_a_missing_module_is_refused(release: Callable[[str, str], None]) -> None:
    release("1.15.0", SOURCE)
    with pytest.raises(OptionError, match="go of framework_x.gone is missing"):
        check_overridden("x", "framework-x", ("1.15",), {"framework_x.gone:go": ()})


@pytest.mark.parametrize(("version", "warnings"), [("1.15.2", 0), ("1.16.0", 1), ("1.1", 1), ("1.150", 1)])
def test_an_untested_release_warns_once(
    release: Callable[[str, str], None], caplog: pytest.LogCaptureFixture, version: str, warnings: int
) -> None:
    release(version, SOURCE)
    check()
    check()
    warned = f"tested with framework-x 1.14 and 1.15, and not with {version}"
    assert [warned in each for each in caplog.messages] == [True] * warnings
