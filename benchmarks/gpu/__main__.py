"""`make gpu`, or `python -m benchmarks.gpu`: build, GPU tests, our figures, the peers, one summary.

Exit codes: 0 everything of ours ran and passed · 1 a test failed, or one of our own figures could not be
measured · 2 wrong arguments · 3 there is no GPU that torch can use · 4 the build failed
· 130, 143 interrupted.
A peer that is missing, or for which no time was left, is said and is no error.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from benchmarks.gpu import machine
from benchmarks.gpu.course import STAGES, Course, Wish
from benchmarks.gpu.summary import text_of
from benchmarks.peers import PEERS

NO_GPU = 3


def main(arguments: list[str] | None = None) -> int:
    wish = parse(arguments)
    # So that `finally` ends what runs, also when `timeout` or a scheduler asks.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    chosen = machine.choose(wish.device, here=wish.here)
    if isinstance(chosen, str):
        print(f"make gpu: {chosen}", file=sys.stderr)
        return NO_GPU
    wish.out.mkdir(parents=True, exist_ok=True)
    course = Course(wish, chosen)
    try:
        return course.run()
    finally:
        text = text_of(course.record.found)
        (wish.out / "summary.txt").write_text(text)
        print(text)
        print(f"written: {wish.out / 'gpu.json'}, {wish.out / 'summary.txt'}")


def parse(arguments: list[str] | None) -> Wish:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("bench-output/gpu"), help="where results go")
    parser.add_argument("--seconds", type=float, default=525.0, help="for all of it; the rest is left out")
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
    return Wish(
        out=given.out.resolve(),
        seconds=given.seconds,
        stages=stages,
        peers=peers,
        tests=given.tests,
        folder=given.folder,
        device=given.device,
        small=given.small,
        here=given.here,
        command=[Path(sys.executable).name, "-m", "benchmarks.gpu", *(arguments or sys.argv[1:])],
    )


# Those first that people would choose in our place, and that cost the loop least.
_ORDER = (
    "torch_save", "dcp_async_kept", "dlrover_memory", "nvrx", "dcp_async", "torch_checkpointing",
    "dcp_save", "safetensors", "torchsnapshot", "dlrover",
)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
