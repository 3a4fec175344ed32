"""A fuzzer over everything that is read back: versions of the catalogue, manifests, parts, control pages,
metadata, values. What it makes must be refused by name, or be read; nothing else, and in bounded time.

A program of its own: `python -m tests.hostile.fuzz --minutes 60 --seed 1`. The corpus is a
run with one of everything, and sealed slots.
"""

import argparse
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from flashckpt._native import xxh3_128
from flashckpt.errors import DamagedError, FormatError, KeeperError
from flashckpt.format import typed
from flashckpt.format.catalogue import Catalogue
from flashckpt.format.manifest import Manifest, PartHead
from flashckpt.format.metadata import Metadata
from flashckpt.format.owner import Alive
from flashckpt.format.records import Part
from flashckpt.memory import region as page
from flashckpt.memory.slot import Slot
from flashckpt.store.compressed_file import codec, read_table, table_bytes
from tests.format.replicated import part_of, rank_of, table
from tests.hostile.made_run import make_run
from tests.keeper.region import write_constants
from tests.memory.test_slot import fill, make
from tests.memory.test_slot_shared import ATTEMPT, CONSTANTS, DATA, NONCE, fill_shared

LONGEST_S = 10.0
MOST_BYTES = 4 << 30
_REFUSED = (DamagedError, FormatError, KeeperError)
_NUMBERS = (0, 1, 2, 7, 8, 127, 128, 255, *(2**n - d for n in (16, 31, 32, 48, 63) for d in (0, 1)))
_WORDS = (
    b"null", b"true", b"-1", b"1e999", b"NaN", b"9" * 5000, b"[" * 300, b'{"a":' * 300, b'"../x"', b'"/x"',
    b'"\\ud800"', b'"\\u0000"', b"{}", b"[]", b'""', b"0.5", b"1" + b"0" * 30, b",", b":", b'"checksum":',
)  # fmt: skip
_VALUES = typed.encode_json({"a": (1, 2.5, b"x"), "b": {3: {4}, "c": [None, float("inf")]}})


@dataclass(frozen=True)
class Target:
    """What reads bytes, what it is fed at first, and how its checksums are made right again."""

    corpus: list[bytes]
    read: Callable[[bytes], object]
    repair: Callable[[bytes], bytes] = lambda data: data


@dataclass(frozen=True)
class Finding:
    target: str
    data: bytes
    story: str


def _files(folder: Path, pattern: str) -> list[bytes]:
    found = [path.read_bytes() for path in sorted(folder.rglob(pattern))]
    assert found, pattern
    return found


def _resealed(data: bytes) -> bytes:
    """The same JSON with the checksum of what stands before it."""
    head, mark, _ = data.rpartition(b',"checksum":"')
    return head + mark + xxh3_128(head).hex().encode() + b'"}\n' if mark else data


def _head_resealed(data: bytes) -> bytes:
    head, mark, rest = data.partition(b',"head":"')
    return head + mark + xxh3_128(head).hex().encode() + rest[32:] if mark else data


def _replicated() -> bytes:
    """A part of two ranks that hold leaves alike."""
    shared = table((0, 1, 2), {"model.weight": 0, "model.tied": 1, "optimizer.step": 2})
    return part_of(rank_of(0, shared), rank_of(1, shared), world=4).to_bytes()


def _slots() -> list[bytes]:
    """A slot, one whose snapshot names a region for its constants, and such a region."""
    plain, shared, constants = make(), make(), make(nonce=NONCE, holds_constants=True)
    fill(plain, 5)
    fill_shared(shared)
    write_constants(constants, 1, ATTEMPT, CONSTANTS, DATA)
    found = []
    for slot in (plain, shared, constants):
        found.append(os.pread(slot.descriptor, slot.header.num_bytes, 0))
        slot.close()
    return found


def _read_slot(data: bytes) -> None:
    descriptor = os.memfd_create("fuzz")
    os.write(descriptor, data)
    slot = Slot.open(descriptor, map_image=False)
    try:
        for index in range(page.OWNERS + 2):
            slot.owner(index)
        assert len(slot.torn[1]) <= page.TORN_LEAVES
        sealed = slot.sealed()
        if sealed is not None:
            slot.metadata(sealed)
    finally:
        slot.close()


def _repaired_slot(data: bytes) -> bytes:
    """Checksums of what does not move, of the metadata and of the record, in this order."""
    new = bytearray(data)
    if len(new) < page.RECORD_OFFSET + page.RECORD_BYTES:
        return data
    new[240:256] = xxh3_128(bytes(new[:240]))
    start, fields = page.RECORD_OFFSET, page.RECORD_OFFSET + page.RECORD_FIELDS_OFFSET
    place = fields + 8 * list(page.Record.__dataclass_fields__).index("metadata_bytes")
    num_bytes = min(int.from_bytes(new[place : place + 8], "little"), len(new))
    new[start : start + 16] = xxh3_128(bytes(new[4096 : 4096 + num_bytes]))
    end = start + page.RECORD_FIELDS_END
    new[end : end + 16] = xxh3_128(bytes(new[start:end]))
    return bytes(new)


_PLAIN = bytes(range(256)) * 40
_TABLE_BYTES = len(table_bytes(len(_PLAIN), [4], [0]))


def _compressed() -> bytes:
    frame = codec().pack(4, memoryview(_PLAIN))
    return frame + table_bytes(len(_PLAIN), [4], [len(frame)])


def _read_compressed(data: bytes) -> bytes:
    def read(offset: int, num_bytes: int) -> bytes:
        assert 0 <= offset <= offset + num_bytes <= len(data)
        return data[offset : offset + num_bytes]

    table, plain = read_table(read, "file", len(data), len(_PLAIN)), bytearray(len(_PLAIN))
    try:
        codec().unpack(table.widths[0], read(0, table.offsets[1]), memoryview(plain))
    except ValueError as error:
        raise DamagedError(str(error)) from error
    return bytes(plain)


def _repaired_table(data: bytes) -> bytes:
    start = max(0, len(data) - _TABLE_BYTES)
    return data[:-16] + xxh3_128(data[start:-16]) if len(data) > _TABLE_BYTES else data


def targets() -> dict[str, Target]:
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        make_run(folder)
        return _targets(Path(folder))


def _targets(run: Path) -> dict[str, Target]:
    slots = _slots()
    return {
        "catalogue": Target(
            _files(run, "catalogue/*"), lambda data: Catalogue.from_bytes(data, "file"), _resealed
        ),
        "manifest": Target(
            _files(run, "manifest-*.json"), lambda data: Manifest.from_bytes(data, "file"), _resealed
        ),
        "alive": Target(_files(run, "alive/*"), lambda data: Alive.from_bytes(data, "file"), _resealed),
        "part": Target(
            [*_files(run, "node-*.json"), _replicated()],
            lambda data: Part.from_bytes(data, "file"),
            lambda data: _resealed(_head_resealed(data)),
        ),
        "head of a part": Target(
            [_replicated()], lambda data: PartHead.from_prefix(data, "file"), _head_resealed
        ),
        "compressed shard": Target([_compressed()], _read_compressed, _repaired_table),
        "slot": Target(slots, _read_slot, _repaired_slot),
        "metadata": Target([slot[4096:8192] for slot in slots], Metadata.unpack),
        "values": Target([_VALUES], typed.decode_json),
    }


def mutated(data: bytes, other: bytes, luck: random.Random) -> bytes:
    """A few changes of the kinds that readers stumble over."""
    new = bytearray(data)
    for _ in range(luck.choice([1, 1, 2, 4, 16])):
        at, count = luck.randrange(len(new) + 1), luck.choice([1, 2, 4, 8, 64])
        kind = luck.randrange(8)
        if kind == 0 and at < len(new):
            new[at] ^= 1 << luck.randrange(8)
        elif kind == 1:
            del new[at : at + count]
        elif kind == 2:
            new[at:at] = new[at : at + count]
        elif kind == 3:
            new[at : at + count] = luck.randbytes(count)
        elif kind == 4:
            start = luck.randrange(len(other) + 1)
            new[at : at + count] = other[start : start + count]
        elif kind == 5:
            new[at // 8 * 8 : at // 8 * 8 + 8] = luck.choice(_NUMBERS).to_bytes(8, "little")
        elif kind == 6:
            word = luck.choice(_WORDS)
            new[at : at + luck.choice([0, len(word)])] = word
        else:
            del new[at:]
    return bytes(new)


def _late(number: int, frame: FrameType | None) -> NoReturn:
    raise TimeoutError(f"not done after {LONGEST_S:.0f} s")


def look(name: str, target: Target, data: bytes) -> Finding | None:
    """None where the bytes were read or refused as they must be."""
    before = signal.signal(signal.SIGALRM, _late)
    signal.setitimer(signal.ITIMER_REAL, LONGEST_S)
    try:
        target.read(data)
    except _REFUSED:
        pass
    except Exception:
        return Finding(name, data, traceback.format_exc())
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return None


def fuzz(name: str, target: Target, luck: random.Random, rounds: int) -> Finding | None:
    """The first finding of so many rounds. Half of them with checksums that are right again."""
    for _ in range(rounds):
        data = mutated(luck.choice(target.corpus), luck.choice(target.corpus), luck)
        finding = look(name, target, target.repair(data) if luck.random() < 0.7 else data)
        if finding is not None:
            return finding
    return None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    chosen = parser.parse_args(arguments)
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    luck, known, until = random.Random(chosen.seed), targets(), time.monotonic() + 60 * chosen.minutes
    rounds = 0
    while time.monotonic() < until:
        for name, target in known.items():
            finding = fuzz(name, target, luck, 200)
            rounds += 200
            if finding is not None:
                with tempfile.NamedTemporaryFile(prefix=f"fuzz-{name}-", delete=False) as file:
                    file.write(finding.data)
                print(f"seed {chosen.seed}, {name}: {file.name}\n{finding.story}")
                return 1
    print(f"seed {chosen.seed}: {rounds} inputs to {len(known)} readers, nothing found")
    return 0


if __name__ == "__main__":
    sys.exit(main())
