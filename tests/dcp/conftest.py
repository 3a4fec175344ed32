"""What tests of DCP on several ranks get."""

from __future__ import annotations

from tests.ranks.conftest import launcher

__all__ = ["launcher"]
