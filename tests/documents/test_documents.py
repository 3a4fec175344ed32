"""What documents promise: their links lead to files, their examples parse, the names in them exist."""

import ast
import re
from importlib.util import find_spec
from pathlib import Path

import flashckpt

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*/*.md")])
TEXTS = {str(path.relative_to(ROOT)): path.read_text() for path in DOCUMENTS}
EXAMPLES = [
    (name, block)
    for name, text in TEXTS.items()
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL)
]


def test_relative_links_lead_to_files() -> None:
    links = [
        (name, link) for name, text in TEXTS.items() for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)
    ]
    files = [(name, link) for name, link in links if "://" not in link]
    assert len(files) > 100
    assert [(name, link) for name, link in files if not (ROOT / name).parent.joinpath(link).exists()] == []


def test_python_examples_parse() -> None:
    for name, block in EXAMPLES:
        assert ast.parse(block.replace("…", "..."), name).body


def test_public_names_in_examples_exist() -> None:
    names = [
        (name, public) for name, block in EXAMPLES for public in re.findall(r"\bflashckpt\.(\w+)", block)
    ]
    assert names
    for name, public in names:
        assert public in flashckpt.__all__ or find_spec(f"flashckpt.{public}"), (name, public)


def test_make_targets_in_the_documents_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:`|^ *)make ([a-z0-9-]+)", "\n".join(TEXTS.values()), re.MULTILINE))
    assert "demo" in named
    assert named - targets == set()


def test_published_measurements_hold_no_path_of_a_machine() -> None:
    reports = sorted(ROOT.glob("docs/benchmarks/*.json"))
    assert reports
    for report in reports:
        assert re.findall(r"(?<![\w.])/(?!dev/)[\w.-]+/[\w./-]*", report.read_text()) == [], report.name
