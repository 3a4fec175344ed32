"""One turn of one client, in a process of its own: `python -m benchmarks.stores.turn JSON`. Prints what the
transfer took: seconds by the clock, and of CPU in all threads of the process."""

from __future__ import annotations

import json
import resource
import sys
import time

from benchmarks.stores.clients import CLIENTS, Memory, Place


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    job = json.loads(sys.argv[1])
    try:
        client = CLIENTS[job["client"]](Place(**job["place"]))
    except ImportError as error:
        print(json.dumps({"lacking": str(error)}))
        return
    memory = Memory(**job["memory"])
    transfer = client.upload if job["way"] == "upload" else client.download
    began, began_cpu = time.perf_counter(), cpu_s()
    transfer(memory)
    gib = memory.num_bytes / 2**30
    found = {
        "new_memory_s": memory.new_memory_s / gib,
        "wall_s": (time.perf_counter() - began) / gib,
        "cpu_s": (cpu_s() - began_cpu) / gib,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
