"""What documents promise: their links lead to files, their examples parse, the names in them exist."""

from __future__ import annotations

import ast
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

import flashckpt

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*/*.md")])
NAMES = [str(path.relative_to(ROOT)) for path in DOCUMENTS]


@pytest.mark.parametrize("name", NAMES)
def test_relative_links_lead_to_files(name: str) -> None:
    text = (ROOT / name).read_text()
    links = [link for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) if "://" not in link]
    assert [link for link in links if not (ROOT / name).parent.joinpath(link).exists()] == []


@pytest.mark.parametrize("name", NAMES)
def test_python_examples_parse(name: str) -> None:
    for block in re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL):
        assert ast.parse(block.replace("…", "...")).body


@pytest.mark.parametrize("name", NAMES)
def test_public_names_in_examples_exist(name: str) -> None:
    for block in re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL):
        for public in re.findall(r"\bflashckpt\.(\w+)", block):
            # A module of its own is one of an integration, or of the state.
            assert public in flashckpt.__all__ or find_spec(f"flashckpt.{public}"), public


def test_make_targets_in_the_documents_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        target
        for path in DOCUMENTS
        for target in re.findall(r"(?:`|^ *)make ([a-z0-9-]+)", path.read_text(), re.MULTILINE)
    }
    assert "demo" in named
    assert named - targets == set()


def test_published_measurements_hold_no_path_of_a_machine() -> None:
    reports = sorted(ROOT.glob("docs/benchmarks/*.json"))
    assert reports
    for report in reports:
        assert re.findall(r"(?<![\w.])/(?!dev/)[\w.-]+/[\w./-]*", report.read_text()) == [], report.name
