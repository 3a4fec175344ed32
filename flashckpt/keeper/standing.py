"""What a trainer needs on its node for a keeper to know it: the runtime folder, and its life lock in it.

Owns making both again after somebody has swept them away (a logout that removes what its user has in shared
memory, a cleaner of temporary files). Starts no keeper.
"""

from __future__ import annotations

from flashckpt.events import log
from flashckpt.memory.runtime import LifeLock, RuntimeFolder


def make_stand(runtime: RuntimeFolder, life: LifeLock) -> bool:
    """Whether something had to be made again: then no keeper knows this trainer any more. Raises KeeperError
    and OSError where it cannot be."""
    is_gone = not runtime.exists()
    if is_gone:
        runtime.renew()
    if life.stands(runtime):
        return False
    life.renew(runtime)
    log.warning(
        "%s was removed while this run was trained. It was made again, and what is in memory is handed to a "
        "new keeper; if all processes die before the next commit, memory is lost with them. Keep whatever "
        "removes it away, or set FLASHCKPT_RUNTIME to another folder.",
        runtime.path if is_gone else f"{runtime.path}/{life.name}",
    )
    return True
