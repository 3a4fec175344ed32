"""Models of stores: a local folder, an object store, a folder on NFS, each with its faults.

A model is pure: a request and the files give the files after it, and the answer. A record is kept as it is;
an answer that is an exception is raised in the process.
"""

import errno
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from flashckpt.catalogue.requests import (
    Copy,
    Create,
    Delete,
    Files,
    Folders,
    Has,
    Put,
    Read,
    Request,
    Steps,
)
from flashckpt.errors import DamagedError
from flashckpt.format.catalogue import CATALOGUE, Catalogue
from flashckpt.format.manifest import File

World = Mapping[str, Any]
"""The content of each file, by STORE/PATH."""


@dataclass(frozen=True)
class Short:
    """The content of a shard that is being written, or of a file that is cut."""

    num_bytes: int = 0


SHORT = Short()
PAGE = 3


@dataclass(frozen=True, slots=True)
class Link(Request):
    """Give a temporary file its name, unless that is taken; the temporary name goes."""

    folder: str
    temporary: str
    name: str


@dataclass(frozen=True, slots=True)
class Page(Request):
    """The next names of a listing, after `after`."""

    listing: Files | Folders
    after: str


@dataclass(frozen=True, slots=True)
class Overwrite(Put):
    """Write a file over another one, as no function of the protocol does."""


@dataclass(frozen=True)
class Report:
    """What a process says to its user. It takes no turn of its own."""

    kind: str
    value: Any


def no_answer() -> OSError:
    return OSError(errno.EREMOTEIO, "no answer")


@dataclass(frozen=True)
class Store:
    """How a store carries out requests.

    has_temporaries: a creation is two requests, a temporary file and its link; a shard is seen while it is
        written (POSIX).
    is_paged: a listing is several requests, of PAGE names each.
    loses_answers: a creation fails, and took effect, or takes effect at any later time, or never does (S3).
    loses_all_answers: the same for every write and deletion.
    repeats: a creation whose answer was lost is sent again by the client, and finds its own file (NFS).
    is_stale: a process can be given an older listing of a folder, but not from before its own last change
        there: by one change in catalogue/ (fewer than the versions that are kept), by two elsewhere (NFS).
    """

    name: str
    has_temporaries: bool = False
    is_paged: bool = False
    loses_answers: bool = False
    loses_all_answers: bool = False
    repeats: bool = False
    is_stale: bool = False

    @property
    def has_faults(self) -> bool:
        return self.loses_answers or self.loses_all_answers or self.repeats

    def adapt(self, process: str, steps: Steps[Any]) -> Generator[Any, Any, None]:
        """Divide the requests of a process into those that this store carries out at once."""
        request = _next(steps, None)
        while request is not None:
            answer: Any = None
            try:
                if isinstance(request, Put) and self.has_temporaries and "/rank-" in request.path:
                    yield Put(request.store, request.path, SHORT)  # type: ignore[arg-type]
                    answer = yield request
                elif isinstance(request, Copy) and self.has_temporaries and "/rank-" in request.path:
                    yield Put(request.target, request.target_path, SHORT)  # type: ignore[arg-type]
                    answer = yield request
                elif isinstance(request, Create) and self.has_temporaries:
                    folder, _, name = request.path.rpartition("/")
                    temporary = f".{name}.{process}.tmp"
                    yield Put(request.store, f"{folder}/{temporary}", request.record)
                    answer = yield Link(request.store, folder, temporary, name)
                elif isinstance(request, (Files, Folders)) and self.is_paged:
                    found: list[Any] = []
                    while len(page := (yield Page(request.store, request, _last(found)))) == PAGE:
                        found += page
                    found += page
                    answer = dict(found) if isinstance(request, Files) else tuple(found)
                else:
                    answer = yield request
            except (OSError, DamagedError) as error:
                answer = error
            request = _next(steps, answer)

    def outcomes(
        self, world: World, before: Mapping[str, Any], process: str, request: Any, faults: int
    ) -> Iterator[tuple[str, World, Any, str]]:
        """Yield each (fault or "", files, answer, effect) of a request. `effect` is "", "now" or "late"."""
        after, answer = self.apply(world, request)
        effect = "" if after is world else "now"
        yield "", after, answer, effect
        if isinstance(request, (Files, Folders)):
            for changer, shown in reversed(before.get(listing_key(request), ())):
                if changer == process:
                    break
                if shown != answer:
                    yield "an old listing", world, shown, ""
        is_write = isinstance(request, (Put, Create, Link, Delete, Copy))
        if faults and (
            (is_write and self.loses_all_answers) or (isinstance(request, Create) and self.loses_answers)
        ):
            yield "takes effect, and fails", after, no_answer(), effect
            yield "fails, and may take effect later", world, no_answer(), "late"
        if faults and self.repeats and isinstance(request, (Create, Link)) and answer is True:
            yield "takes effect, and is sent again", after, False, effect

    def apply(self, world: World, request: Any) -> tuple[World, Any]:
        """Return the files after a request, the same mapping if nothing changed, and the answer."""
        if isinstance(request, Page):
            found = self.apply(world, request.listing)[1]
            rows = list(found.items()) if isinstance(found, dict) else list(found)
            return world, tuple(each for each in rows if _last([each]) > request.after)[:PAGE]
        if isinstance(request, Files):
            return world, files_in(world, f"{request.store}/{request.folder}/")
        if isinstance(request, Folders):
            return world, folders_in(world, f"{request.store}/{request.folder}/")
        if isinstance(request, Delete):
            return _without(world, [f"{request.store}/{request.folder}/{name}" for name in request.names])
        if isinstance(request, Link):
            source, path = (
                f"{request.store}/{request.folder}/{e}" for e in (request.temporary, request.name)
            )
            if source not in world:
                return world, FileNotFoundError(errno.ENOENT, "deleted")
            rest = _without(world, [source])[0]
            return (rest, False) if path in world else ({**rest, path: world[source]}, True)
        path = f"{request.store}/{request.path}"
        if isinstance(request, Has):
            return world, size_of(world.get(path)) == request.num_bytes
        if isinstance(request, Read):
            content = world.get(path)
            is_read = content is None or isinstance(content, request.kind)
            return world, content if is_read else DamagedError(f"{path} is damaged.")
        if isinstance(request, Copy):
            if path not in world:
                return world, None
            there, content = request.target_path, world[path]
            answer = File(there.rpartition("/")[2], size_of(content))
            return {**world, f"{request.target}/{there}": content}, answer
        assert isinstance(request, (Create, Put)), request
        if isinstance(request.record, Catalogue):
            _round_trip(request.record)
        if path in world and not isinstance(world[path], Short) and not isinstance(request, Overwrite):
            is_other = isinstance(request, Put) and world[path] != request.record
            return world, FileExistsError(errno.EEXIST, "another file") if is_other else False
        return {**world, path: request.record}, True


@cache
def _round_trip(catalogue: Catalogue) -> None:
    """A version that is written can be read."""
    assert Catalogue.from_bytes(catalogue.to_bytes(), "file") == catalogue


def _next(steps: Generator[Any, Any, Any], answer: Any) -> Any:
    """The next request of a process, None at its end."""
    try:
        return steps.throw(answer) if isinstance(answer, BaseException) else steps.send(answer)
    except StopIteration:
        return None


def _last(found: list[Any]) -> str:
    if not found:
        return ""
    return str(found[-1] if isinstance(found[-1], str) else found[-1][0])


def size_of(content: Any) -> int:
    """The length of a file: one byte if it is whole, -1 if it does not exist."""
    return -1 if content is None else content.num_bytes if isinstance(content, Short) else 1


def files_in(world: World, prefix: str) -> dict[str, int]:
    rest = ((path[len(prefix) :], path) for path in sorted(world) if path.startswith(prefix))
    return {name: size_of(world[path]) for name, path in rest if "/" not in name}


def folders_in(world: World, prefix: str) -> tuple[str, ...]:
    rest = (path[len(prefix) :] for path in world if path.startswith(prefix))
    return tuple(sorted({name.partition("/")[0] for name in rest if "/" in name}))


def listing_key(request: Files | Folders) -> str:
    kind = "files" if isinstance(request, Files) else "folders"
    return f"{kind} {request.store}/{request.folder}"


def listings_of(path: str) -> Iterator[tuple[Files | Folders, int]]:
    """The listings that a change of this file can change, each with the number of older ones that NFS can
    show."""
    store, _, rest = path.partition("/")
    folder = rest.rpartition("/")[0]
    yield Files(store, folder), 1 if folder == CATALOGUE else 2
    while folder := folder.rpartition("/")[0]:
        yield Folders(store, folder), 2


def _without(world: World, paths: list[str]) -> tuple[World, None]:
    if world.keys().isdisjoint(paths):
        return world, None
    gone = set(paths)
    return {path: content for path, content in world.items() if path not in gone}, None


PLAIN = Store("plain")
POSIX = Store("folder", has_temporaries=True)
S3 = Store("objects", loses_answers=True)
PAGED = Store("objects, paged", is_paged=True, loses_answers=True)
FLAKY = Store("objects, flaky", loses_all_answers=True)
NFS = Store("nfs", is_stale=True, repeats=True)


def run_alone(world: World, steps: Steps[Any]) -> tuple[World, Any]:
    """Run one process to its end, with nothing beside it and no faults. Returns the files, and its result."""
    answer: Any = None
    while True:
        try:
            request = steps.throw(answer) if isinstance(answer, BaseException) else steps.send(answer)
        except StopIteration as ended:
            return world, ended.value
        answer = None
        if not isinstance(request, Report):
            world, answer = PLAIN.apply(world, request)
