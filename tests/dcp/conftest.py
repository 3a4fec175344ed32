"""Fixtures of tests of DCP on several ranks."""

from __future__ import annotations

from tests.ranks.conftest import launcher

__all__ = ["launcher"]
