"""`make gpu`, or `python -m benchmarks.gpu`: build, GPU tests, our figures, the peers, and summaries.

Exit codes: 0 what ran of ours passed · 1 a test failed, or one of our own figures could not be
measured · 2 wrong arguments · 3 there is no GPU that torch can use · 4 the build failed
· 130, 143 interrupted.
A peer that is missing, and whatever there was no time left for, is reported and is no error.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from benchmarks.gpu import machine
from benchmarks.gpu.course import NOT_BUILT, PARTS, STAGES, Course, Wish
from benchmarks.gpu.stages import Budget
from benchmarks.gpu.summary import text_of
from benchmarks.peers import PEERS

NO_GPU = 3


def main(arguments: list[str] | None = None) -> int:
    given = parse(arguments)
    budget = Budget(given.seconds)
    # So that `finally` ends what runs, also when `timeout` or a scheduler asks.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    chosen = machine.choose(given.device, here=given.here)
    if isinstance(chosen, str):
        print(f"make gpu: {chosen}", file=sys.stderr)
        return NO_GPU
    code = 0
    for index, wish in enumerate(given.wishes):
        wish.out.mkdir(parents=True, exist_ok=True)
        # The search for a torch that sees the GPU is in the time of the first part.
        course = Course(wish, chosen, Budget(given.seconds) if index else budget)
        try:
            code = max(code, course.run())
        finally:
            text = text_of(course.record.found)
            (wish.out / "summary.txt").write_text(text)
            print(text)
            print(f"written: {wish.out / 'gpu.json'}, {wish.out / 'summary.txt'}", flush=True)
        if code == NOT_BUILT:
            break
    return code


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """What the command line says; `wishes` are the parts to run, each with a folder of its own."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("bench-output/gpu"), help="where results go")
    parser.add_argument(
        "--part", choices=list(PARTS), default=None, help="which; default: one after the other"
    )
    parser.add_argument("--seconds", type=float, default=525.0, help="for each part; the rest is left out")
    parser.add_argument("--stages", default=",".join(STAGES), help="which, of " + ",".join(STAGES))
    parser.add_argument("--peers", default="", help="which and in which order, or none; default: all")
    parser.add_argument("--tests", default="tests", help="where to look for tests that are marked gpu")
    parser.add_argument("--folder", type=Path, default=None, help="where checkpoints go: the disk to measure")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: to try the command")
    parser.add_argument("--small", action="store_true", help="16 MiB of state, to try the command out")
    parser.add_argument("--here", action="store_true", help="in this environment; build nothing")
    given = parser.parse_args(arguments)
    stages = given.stages.split(",")
    peers = [name for name in (given.peers or ",".join(_ORDER)).split(",") if name != "none"]
    for name, known in ((stages, STAGES), (peers, tuple(PEERS))):
        unknown = [one for one in name if one not in known]
        if unknown:
            parser.error(f"{', '.join(unknown)}: unknown; there are {', '.join(known)}")
    found = {
        part: [one for one in PARTS[part] if one in stages]
        for part in ([given.part] if given.part else PARTS)
    }
    given.wishes = [
        Wish(
            out=given.out.resolve() / part,
            stages=wanted,
            peers=peers,
            tests=given.tests,
            folder=given.folder,
            device=given.device,
            small=given.small,
            here=given.here,
            command=[Path(sys.executable).name, "-m", "benchmarks.gpu", *(arguments or sys.argv[1:])],
        )
        for part, wanted in found.items()
        if {*wanted} - {"build"}
    ]
    if not given.wishes:
        parser.error(f"--stages {given.stages}: nothing to run but a build, in {', '.join(found)}")
    return given


# Those first that people would choose in our place, and that cost the loop least.
_ORDER = (
    "torch_save", "dcp_async_kept", "dlrover_memory", "nvrx", "dcp_async", "torch_checkpointing",
    "dcp_save", "safetensors", "torchsnapshot", "dlrover",
)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
