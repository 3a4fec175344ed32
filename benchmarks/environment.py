"""The peers' environment: `.venv-bench`, which stands on the one that runs the bench.

So torch, numpy and flashckpt are the same for all, and nothing of the peers reaches the environment that
people work in. A peer that cannot be installed here is reported with pip's reason; it stops no other.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
import site
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_REQUIREMENTS = _ROOT / "benchmarks" / "requirements.txt"
_HELD = ("torch", "numpy")


def prepare(folder: Path, wheels: str = "") -> tuple[str, dict[str, str]]:
    """The interpreter to run peers with, and why what could not be installed was not, by distribution.
    wheels: a folder to install from, without a network; versions are then those that it has."""
    python = folder / "bin" / "python"
    stamp = folder / ".installed.json"
    key = _key(wheels)
    if stamp.exists():
        installed = json.loads(stamp.read_text())
        # What a network refused once it may give now; a folder has what it has.
        if installed["key"] == key and (wheels or not installed["failures"]):
            return str(python), installed["failures"]
    if not python.exists():
        _create(folder)
    failures = _install(python, folder / "install.log", folder / "constraints.txt", wheels)
    stamp.write_text(json.dumps({"key": key, "failures": failures}))
    return str(python), failures


def _key(wheels: str) -> str:
    """What decides whether the environment is up to date."""
    names = sorted(path.name for path in Path(wheels).iterdir()) if wheels else []
    parts = [_REQUIREMENTS.read_text(), sys.executable, wheels, *names, *_constraints()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _constraints() -> list[str]:
    """torch and numpy as they are: a peer must run on them or be reported."""
    return [f"{name}=={importlib.metadata.version(name)}" for name in _HELD]


def _create(folder: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    below = "; ".join(f"site.addsitedir({path!r})" for path in site.getsitepackages())
    # A .pth line, and not --system-site-packages: that would stand on the interpreter's own packages and
    # not on those of the environment that runs this. addsitedir reads the .pth files there, editable
    # installs included.
    (packages / "below.pth").write_text(f"import site; {below}\n")


def _install(python: Path, log: Path, constraints: Path, wheels: str) -> dict[str, str]:
    """All at once, which pip resolves best; one by one when that fails."""
    constraints.write_text("\n".join(_constraints()) + "\n")
    wanted = [
        line.strip()
        for line in _REQUIREMENTS.read_text().splitlines()
        if line.strip() and not line.startswith("#")
    ]
    options = ["-c", str(constraints)]
    if wheels:
        # Whatever version is there, in the folder or on the machine, is better than none.
        wanted = [_name(requirement) for requirement in wanted]
        options += ["--no-index", "--find-links", wheels]
    log.write_text("")
    if not _pip(python, log, [*options, *wanted]):
        return {}
    failures = {}
    for requirement in wanted:
        reason = _pip(python, log, [*options, requirement])
        if reason:
            failures[normalized(_name(requirement))] = f"not installed: {reason}"
    return failures


def _name(requirement: str) -> str:
    return re.split(r"[=<>~! ]", requirement)[0]


def _pip(python: Path, log: Path, arguments: list[str]) -> str:
    """Empty when it worked, else the last line that says why not."""
    command = [str(python), "-m", "pip", "install", "--no-input", "--disable-pip-version-check"]
    # A network that is not there must not take minutes to say so.
    command += ["--retries", "1", "--timeout", "15"]
    done = subprocess.run([*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with open(log, "a") as file:
        file.write(done.stdout)
    if done.returncode == 0:
        return ""
    errors = [line for line in done.stdout.splitlines() if line.startswith("ERROR")]
    return (errors or done.stdout.splitlines() or [f"exit code {done.returncode}"])[-1]


def normalized(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def main() -> None:
    """`python -m benchmarks.environment FOLDER REPORT [WHEELS]`: the same, told in a file."""
    folder, report, *wheels = sys.argv[1:]
    python, failures = prepare(Path(folder), *wheels)
    Path(report).write_text(json.dumps({"python": python, "failures": failures}))


if __name__ == "__main__":
    main()
