"""A run's whole life on the store without folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashckpt.errors import OptionError
from flashckpt.store import open_store
from tests.contracts.flat_store import installed
from tests.contracts.run_contract import RunContract, UrlTrainer


@pytest.mark.long
class TestFlatRun(RunContract):
    """tests/stores/test_s3_run.py is the same on a real server."""

    @pytest.fixture
    def trainer(self, tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch) -> UrlTrainer:
        packages = installed(tmp_path / "packages")
        monkeypatch.syspath_prepend(packages)
        return UrlTrainer(f"flat://{tmp_path}/bucket", tmp_path, runtime, packages=packages)


def test_a_scheme_that_no_package_has_is_named(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="flat://"):
        open_store(f"flat://{tmp_path}")
