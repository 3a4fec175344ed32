"""Exports beside a copy of as many bytes on the same disk: `python -m benchmarks.exporting FOLDER`.

Owns a run of one Llama in bf16, without an optimizer. Each figure is from a new process with a cold page
cache, and ends when the bytes are synced. Memory is what the process holds of its own (RssAnon), sampled
while it works; mapped pages of files (RssFile), which the kernel takes back when others need them, are apart.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks import files

_MIB = 1 << 20
_SAMPLE_S = 0.01
WAYS: dict[str, dict[str, Any]] = {
    "copy": {},
    "safetensors": {"format": "safetensors", "only": ["model"]},
    "shards": {"format": "safetensors", "only": ["model"], "max_shard_size": "1GB"},
    "fp16": {"format": "safetensors", "only": ["model"], "dtype": "float16"},
    "torch": {"format": "torch", "only": ["model"]},
    "dcp": {"format": "dcp", "only": ["model"]},
    "hf": {"max_shard_size": "1GB"},
}


class Memory:
    """The most memory of this process since it was started, in bytes, sampled by a thread."""

    def __init__(self) -> None:
        self.most = {"RssAnon": 0, "RssFile": 0}
        self._before = self._now()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self) -> dict[str, int]:
        """The increase of each kind."""
        self._ends.set()
        self._thread.join()
        return {name: value - self._before[name] for name, value in self.most.items()}

    def _run(self) -> None:
        while not self._ends.wait(_SAMPLE_S):
            now = self._now()
            self.most = {name: max(value, now[name]) for name, value in self.most.items()}

    def _now(self) -> dict[str, int]:
        lines = Path("/proc/self/status").read_text().splitlines()
        pairs = (line.split()[:2] for line in lines if line.startswith(("RssAnon", "RssFile")))
        return {name.rstrip(":"): int(kib) * 1024 for name, kib in pairs}


def make_run(folder: Path, gib: float) -> None:
    """A run of one step whose model has about so many bytes."""
    import torch
    import transformers

    import flashckpt
    from flashckpt.commit.assets import write_assets
    from flashckpt.store import open_store
    from flashckpt.transformers import assets_of

    hidden, layer_bytes = 2048, 2 * (4 * 2048**2 + 3 * 2048 * 8192)
    config = transformers.LlamaConfig(
        vocab_size=32000,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=max(1, round(gib * 2**30 / layer_bytes) - 1),
        num_attention_heads=16,
        dtype="bfloat16",
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.view(torch.int16).random_()
    options = flashckpt.Options(slots=1)
    with flashckpt.attach(folder, every=None, persist_every=None, options=options, model=model) as job:
        job.step()
        job.save()
        job.wait()
    write_assets(open_store(folder), assets_of(model))


def measure(way: str, run: Path, out: Path) -> dict[str, Any]:
    """One figure, in this process."""
    if way == "copy":
        source = max(run.glob("data/*/*/rank-*"), key=lambda path: path.stat().st_size)
        began = time.perf_counter()
        shutil.copyfile(source, out)
        with open(out, "rb") as file:
            os.fsync(file.fileno())
        return {"seconds": time.perf_counter() - began, "num_bytes": out.stat().st_size}
    # Imports are no part of an export of 10 GB, and of no interest here.
    import torch.distributed.checkpoint

    from flashckpt.export import step
    from flashckpt.store import open_store

    assert torch.distributed.checkpoint
    memory = Memory()
    if way == "hf":
        import transformers.models.llama

        from flashckpt.transformers import export

        assert transformers.models.llama.LlamaForCausalLM
        memory = Memory()
        began = time.perf_counter()
        done = export(run, out, **WAYS[way])
    else:
        began = time.perf_counter()
        done = step.export(open_store(run), str(out), **WAYS[way])
    seconds = time.perf_counter() - began
    num_bytes = sum(size for _, size in done.files)
    return {"seconds": seconds, "num_bytes": num_bytes, **memory.end()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="on the disk to measure; needs room for twice --gib")
    parser.add_argument("--gib", type=float, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--measure", nargs=1, choices=list(WAYS), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    run, out = chosen.folder / "run", chosen.folder / "out"
    if chosen.measure:
        print(json.dumps(measure(chosen.measure[0], run, out)))
        return
    if not run.exists():
        make_run(run, chosen.gib)
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in chosen.ways}
    for _ in range(chosen.rounds):
        for way in chosen.ways:
            _remove(out)
            os.sync()
            files.forget(run)
            command = [sys.executable, "-m", "benchmarks.exporting", str(chosen.folder), "--measure", way]
            text = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
            found[way].append(json.loads(text.splitlines()[-1]))
            print(way, found[way][-1], f"load {os.getloadavg()[0]:.1f}", flush=True)
    _remove(out)
    _print(found)


def _print(found: dict[str, list[dict[str, Any]]]) -> None:
    print("| | MB/s, median | of the copy | own memory, MiB | mapped, MiB |\n| --- | --- | --- | --- | --- |")
    rates = {
        way: statistics.median(each["num_bytes"] / each["seconds"] for each in rows)
        for way, rows in found.items()
    }
    for way, rows in found.items():
        anon, mapped = (max(each.get(kind, 0) for each in rows) // _MIB for kind in ("RssAnon", "RssFile"))
        share = f"{rates[way] / rates['copy']:.0%}" if "copy" in rates else ""
        print(f"| {way} | {rates[way] / 1e6:.0f} | {share} | {anon} | {mapped} |")


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
