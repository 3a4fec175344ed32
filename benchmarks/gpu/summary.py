"""The page that a run leaves for people, made of what is in gpu.json, be it half a run or a whole one."""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks.gpu.stages import reason_of
from benchmarks.peers import PEERS
from benchmarks.settings import GIB, MIB


def text_of(found: dict[str, Any]) -> str:
    parts = [
        _head(found),
        _stages(found),
        _tests(found),
        _rates(found),
        _loops(found),
        _ways(found),
        _ranks(found),
        _lacks(found),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(found: dict[str, Any]) -> str:
    machine, settings = found["machine"], found["settings"]
    seconds, state = f"{found.get('seconds', 0):.0f} s", settings["state_bytes"] / GIB
    python = f"Python {machine['python']}, torch {machine['torch']}"
    device = machine["devices"][0] if machine["devices"] else None
    where = f"{device['name']}, {device['memory_bytes'] / GIB:.0f} GiB" if device else "no GPU"
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return "\n".join(
        [
            f"flashckpt on a GPU: {found['began']}, {seconds}, {found['ended'] or 'under way'}",
            f"machine   {where}; driver {machine['driver'] or '?'}, CUDA {machine['torch_cuda'] or '-'}; "
            f"{machine['cores']} cores {machine['processor']}, {machine['memory_bytes'] / GIB:.0f} GiB; "
            f"Linux {machine['kernel']}; load {machine['load_average'][0]:.1f}",
            f"versions  {python}; {versions}; commit {machine['commit']}",
            f"command   {' '.join(found['command'])}"
            + "".join(f" {name}={value}" for name, value in found["environment"].items() if value),
            f"state     {state:.2f} GiB, {settings['layers']} layers, AdamW fused, fp32",
        ]
    )


def _stages(found: dict[str, Any]) -> str:
    return "\n".join(
        ["stages"]
        + [f"  {each['name']:<26}{each['seconds']:7.1f} s  {each['outcome']}" for each in found["stages"]]
    )


def _tests(found: dict[str, Any]) -> str:
    tests = found["tests"]
    if not tests:
        return ""
    counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(tests["counts"].items()))
    lines = [f"tests marked gpu: {counts or 'none'}"]
    for entry in tests["not_passed"]:
        lines.append(f"  {entry['outcome']}: {entry['test']}")
        told = [line for line in entry.get("told", "").splitlines() if line.startswith("E ")]
        lines += [f"      {line}" for line in told[:4]]
    lines += [f"  skipped: {reason}" for reason in tests["skipped"]]
    return "\n".join(lines)


def _rates(found: dict[str, Any]) -> str:
    rates = found["own"].get("rates")
    if not rates:
        return ""
    lines = ["rates of the machine (GiB of the state a second; a clone reads and writes each byte)"]
    for name, each in rates.items():
        if not isinstance(each, dict):
            continue
        if "failed" in each:
            lines.append(f"  {name:<30} not measured: {each['failed']}")
            continue
        seconds = median(each["seconds"])
        rate = each["num_bytes"] / GIB / seconds if seconds else float("inf")
        lines.append(
            f"  {name:<30} {rate:9.2f} GiB/s  ({each['num_bytes'] / GIB:.2f} GiB in {_time(seconds)})"
        )
    if "step_s" in rates:
        lines.append(f"  {'a step':<30} {_time(median(rates['step_s'])):>9}")
    if reason := reason_of(rates):
        lines.append(f"  then: {reason}")
    return "\n".join(lines)


def _loops(found: dict[str, Any]) -> str:
    rows = [
        (PEERS[name][1], found["own"][name])
        for name in ("flashckpt_memory", "flashckpt")
        if name in found["own"]
    ]
    rows += [(each["title"], each) for each in found["peers"].values()]
    if not rows:
        return ""
    lines = [
        "what one checkpoint adds to the loop, beside a step's length; call: the loop stands still, nothing",
        "else going on; durable: from the call until on disk; load: a new process, into the live model;",
        "memory: of the host, at its peak, in times the state",
        f"  {'':<38}{'loop (step)':<34}{'call':>9}{'durable':>10}{'load':>9}{'memory':>10}",
    ]
    for title, each in rows:
        lines.append(f"  {title:<38}{_loop(each)}")
        if reason := reason_of(each):
            lines.append(f"      {reason}")
    return "\n".join(lines)


def _loop(each: dict[str, Any]) -> str:
    costs = []
    for block in each.get("blocks", []):
        step_s = block["plain_s"] / block["steps"]
        cost = (block["with_s"] - block["plain_s"]) / block["taken"] if block["taken"] else None
        costs.append(
            f"{_time(cost)} ({_time(step_s)})" if cost is not None else f"none taken ({_time(step_s)})"
        )
    return (
        f"{', '.join(costs) or '-':<34}{_middle(_calls(each)):>9}{_middle(_durable(each)):>10}"
        f"{_load(each):>9}{_memory(each):>10}"
    )


def _calls(each: dict[str, Any]) -> list[float]:
    alone = [one["call_s"] for one in each.get("alone", [])]
    return alone or [seconds for block in each.get("blocks", []) for seconds in block["calls_s"]]


def _durable(each: dict[str, Any]) -> list[float]:
    if not each.get("commits"):
        return []
    alone = [one["durable_s"] for one in each.get("alone", [])]
    return alone or [
        block["waited_s"] + block["synced_s"] for block in each.get("blocks", []) if block["taken"]
    ]


def _load(each: dict[str, Any]) -> str:
    load = each.get("load", {})
    if "seconds" not in load:
        return "-"
    return _time(load["seconds"]) + ("" if load["exact"] else " WRONG")


def _memory(each: dict[str, Any]) -> str:
    memory = each.get("memory", {})
    if "checkpoints" not in memory:
        return "-"
    return f"{max(0, memory['checkpoints'] - memory['plain']) / each['state_bytes']:.1f} x"


def _ways(found: dict[str, Any]) -> str:
    own, lines = found["own"], []
    ways = own.get("ways", {})
    for name in ("clone", "gate", "wait"):
        each = ways.get(name)
        if each is None:
            continue
        if "failed" in each:
            lines.append(f"  {name:<7} {each['failed']}")
            continue
        shares = ", ".join(
            f"{way} {leaves} leaves {size / GIB:.2f} GiB" for way, leaves, size in each["ways"]
        )
        lines.append(
            f"  {name:<7} a snapshot {_time(each['middle_s'])}, its call {_middle(each['call_s'])}, torch's "
            f"clone {_middle(each['clone_s'])}; {each['snapshots']} snapshots; {shares}"
        )
    if reason := reason_of(ways):
        lines.append(f"  {reason}")
    small = own.get("small", {})
    if "call_s" in small:
        beyond = median(small["call_s"]) - median(small["copy_s"])
        lines.append(
            f"  {small['leaves']:,} small tensors ({small['num_bytes'] / MIB:.0f} MiB): call "
            f"{_middle(small['call_s'])}, {_time(beyond)} beyond the copy in one piece"
        )
    elif reason := reason_of(small):
        lines.append(f"  10,000 small tensors: {reason}")
    return "\n".join(["ways of copying", *lines]) if lines else ""


def _ranks(found: dict[str, Any]) -> str:
    jobs = found["ranks"].get("jobs", [])
    if not jobs:
        return ""
    lines = ["jobs of several ranks (the training thread stands still; durable; load; load on other ranks)"]
    for job in jobs:
        alone, loads = job["alone"], job["loads"]
        told = [_middle([each[name] for each in alone]) for name in ("held_s", "durable_s")]
        told += [
            _load({"load": loads[world]}) for world in sorted(loads, key=lambda w: w != str(job["world"]))
        ]
        title = f"{job['title']}, {job['kind']}, {job['world']} ranks"
        lines.append(f"  {title:<58}" + "".join(f"{each:>11}" for each in told))
    return "\n".join(lines)


def _lacks(found: dict[str, Any]) -> str:
    lacks = found["lacks"]
    return "\n".join(["lacking here", *(f"  {each}" for each in lacks)]) if lacks else "lacking here: nothing"


def _middle(seconds: list[float]) -> str:
    return _time(median(seconds)) if seconds else "-"


def _time(seconds: float) -> str:
    if abs(seconds) < 0.0995:
        return f"{1e3 * seconds:.1f} ms"
    return f"{seconds:.2f} s"
