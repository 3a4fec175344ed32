"""A process that forks a child beside a store. `python -m tests.stores.forked URL before|after`: before its
first request, or after it. Prints what each of the two says of a creation, and then what is there.
"""

import os
import signal
import sys

from flashckpt.store import open_store
from flashckpt.store.base import Store


def said(store: Store, name: str) -> str:
    try:
        return f"{name}: {store.create(name, b'1')}"
    except OSError as error:
        return f"{name}: {error.strerror}"


def main(url: str, when: str) -> None:
    store = open_store(url)
    if when == "after":
        print(said(store, "first"), flush=True)
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # ends a request that would not end
        print(said(store, "child"), said(open_store(url), "anew"), sep="\n", flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    print(said(store, "parent"), [each.name for each in store.list("")], sep="\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
