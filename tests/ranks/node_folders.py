"""A store of which each node has another folder under one URL, as of a path that is not mounted on all nodes:
`node:///folder/run` is `/folder/run-NODE`, where NODE is the name of the node's runtime folder.

`python -m tests.ranks.rank tests.ranks.node_folders URL` attaches to it once.
"""

import os
import sys
from pathlib import Path

from flashckpt.store import ENTRY_POINTS
from flashckpt.store.local import LocalStore

SCHEME = "node://"
PACKAGES = "FLASHCKPT_TEST_PACKAGES"


class NodeFolder(LocalStore):
    """The folder of the node that this process is on."""

    def __init__(self, url: str) -> None:
        self._url = url
        super().__init__(folder_of(url, os.environ["FLASHCKPT_RUNTIME"]))

    @property
    def url(self) -> str:
        return self._url


def folder_of(url: str, runtime: str | Path) -> str:
    """Where a node, by its runtime folder, has what the URL names."""
    return f"{url.removeprefix(SCHEME)}-{os.path.basename(str(runtime))}"


def installed(folder: Path) -> str:
    """Make `folder` one whose packages have this store: for PACKAGES."""
    about = folder / "node_folders-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: node-folders\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[{ENTRY_POINTS}]\nnode = tests.ranks.node_folders:NodeFolder\n")
    return str(folder)


def main() -> None:
    import torch
    import torch.distributed as dist

    import flashckpt

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with flashckpt.attach(sys.argv[1], every=None, persist_every=None, w=torch.zeros(3)) as checkpointer:
        checkpointer.step()
        checkpointer.save()


if __name__ == "__main__":
    packages = os.environ[PACKAGES]
    sys.path.append(packages)
    # For its keeper.
    os.environ["PYTHONPATH"] = f"{packages}:{os.environ.get('PYTHONPATH', '')}"
    main()
