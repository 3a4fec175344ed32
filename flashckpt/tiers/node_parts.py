"""The remote of a run of which each node's own disk has its ranks' part alone: of which step this node sends
its part next.

Owns that nodes which never speak with each other send parts of the same steps: what one has begun in the
remote all others follow, if they have it, the newest first. A step is begun by a file in its folder, under a
name that nobody reads. Rank 0's node begins what is due, one at a time: the next once all parts of the last
are there, or have not come for long. Whoever finds all parts there commits, see `StepCopier`. A node that is
late, dead or has lost its disk leaves a step uncommitted, which no resume sees.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from flashckpt import crashpoints
from flashckpt.commit import retention
from flashckpt.commit.attempts import bounds, newest_claimed
from flashckpt.commit.lineage import VisibleStep, in_lineage
from flashckpt.commit.steps import is_committed, read_manifest
from flashckpt.errors import DamagedError, SupersededError
from flashckpt.format.names import PART, AttemptName, step_attempt_folder
from flashckpt.format.records import Manifest
from flashckpt.store.base import Entry, Store
from flashckpt.tiers.sender_mark import holds_s, is_mark
from flashckpt.tiers.step_copy import Copied, Outcome

log = logging.getLogger(__name__)

_BEGUN = ".begun."
# The parts of other nodes are waited for so many times as long as this node's took, and twice as long each
# time in a row that they did not come.
_TIMES_OWN, _LEAST_WAIT_S, _LONGEST_WAIT_S = 4.0, 60.0, 3600.0
# What nobody has added to for so long, while another step was begun after it, goes. Counted is the time in
# which this node has looked: it is blind while it sends for longer than that, and while no server answers.
_TIMES_OWN_GONE, _LEAST_GONE_S, _LONGEST_COUNTED_S = 20.0, 3600.0, 60.0


@dataclass(frozen=True, slots=True)
class Begun:
    """A step that is begun in the remote, newer than all that are complete there. `files` are those in its
    folder, but for the `marks` of who is at it; `parts` are this node's, none where it has not committed the
    step, or not any more."""

    at: VisibleStep
    files: frozenset[str]
    marks: frozenset[Entry]
    parts: frozenset[str]

    @property
    def all_parts(self) -> frozenset[str]:
        """Those of all nodes that are there."""
        return frozenset(filter(PART.fullmatch, self.files))

    @property
    def is_sent(self) -> bool:
        return bool(self.parts) and self.parts <= self.files

    @property
    def is_to_send(self) -> bool:
        return bool(self.parts) and not self.parts <= self.files


class NodeParts:
    """`meet` commits a step whose parts may all be there, as a look at the target shows. For one thread."""

    def __init__(self, source: Store, target: Store, meet: Callable[[VisibleStep, Store], Outcome]) -> None:
        self._source, self._target, self._meet = source, target, meet
        self._given_up: set[VisibleStep] = set()
        self._met: dict[VisibleStep, frozenset[str]] = {}
        self._sent_s: dict[VisibleStep, float] = {}
        # What was seen of a step last, and for how long it has been so.
        self._still: dict[VisibleStep, tuple[Begun, float]] = {}
        self._looked_s = time.monotonic()
        self._took_s, self._in_vain = 0.0, 0
        self.newest: VisibleStep | None = None

    def look(self, look: Store) -> list[Begun]:
        """What is begun there, newest first; `newest` is then the newest that is complete. One of which the
        last part has come is committed. `look` is one at the target, of just now."""
        begun = self._look(look)
        for each in begun:
            is_new = each.is_sent and self._met.get(each.at) != each.all_parts
            if is_new and self._has_met(each, look):
                return self._look(self._target.at_once())
        return begun

    def _has_met(self, each: Begun, look: Store) -> bool:
        """Whether the step is committed now. Of the same parts it is tried again only where a store failed:
        once all are there, none comes any more. Newer steps do not wait for that."""
        is_tried = True
        try:
            return self._meet(each.at, look) is Outcome.COPIED
        except SupersededError:
            return False  # of what is no step together, who has sent the last part has said so
        except OSError as error:
            is_tried = False
            log.warning("%s: step %d cannot be looked at: %s", self._target.url, each.at.step, error)
            return False
        finally:
            if is_tried:
                self._met[each.at] = each.all_parts

    def _look(self, look: Store) -> list[Begun]:
        found, newest = list[Begun](), None
        for each in in_lineage(look, bounds(look)):
            if is_committed(look, each.step, each.attempt):
                newest = each
                break
            try:
                manifest = read_manifest(look, each.step, each.attempt)
            except DamagedError:
                continue  # nobody can commit it any more
            entries = look.list(step_attempt_folder(each.step, each.attempt))
            marks = frozenset(filter(is_mark, entries))
            files = frozenset(e.name for e in entries if e not in marks)
            if files and (manifest is None or isinstance(manifest, Manifest)):
                found.append(Begun(each, files, marks, self._parts_of(each)))
        if newest != self.newest:
            self.newest, self._in_vain = newest, 0
        known = {each.at for each in found}
        self._met = {at: parts for at, parts in self._met.items() if at in known}
        self._sent_s = {at: when for at, when in self._sent_s.items() if at in known}
        self._still = {at: row for at, row in self._still.items() if at in known}
        return found

    def _parts_of(self, each: VisibleStep) -> frozenset[str]:
        if not is_committed(self._source, each.step, each.attempt):
            return frozenset()
        manifest = read_manifest(self._source, each.step, each.attempt)
        return frozenset(p.file for p in manifest.parts) if isinstance(manifest, Manifest) else frozenset()

    def to_follow(self, begun: Sequence[Begun], *, is_last: bool) -> VisibleStep | None:
        """The newest of which this node's part is to be sent. None older than one that was sent: another node
        may lack that one, but only at the end (`is_last`) is an older one the newest that all have."""
        for each in begun:
            if each.is_to_send and each.at not in self._given_up:
                return each.at
            if each.is_sent and not is_last:
                return None
        return None

    def give_up(self, each: VisibleStep) -> None:
        """Another try does not mend what keeps this node from sending its part: it is not kept up by it."""
        self._given_up.add(each)

    def may_begin(self, begun: Sequence[Begun], *, is_last: bool) -> bool:
        """Whether another one may be begun, though parts of the last may be missing."""
        sent = next((each.at for each in begun if each.is_sent), None)
        if sent is None or is_last:
            return True
        waited_s = time.monotonic() - self._sent_s.setdefault(sent, time.monotonic())
        longest_s = max(_LEAST_WAIT_S, _TIMES_OWN * self._took_s) * 2.0 ** min(self._in_vain, 10)
        if waited_s < min(longest_s, max(_LONGEST_WAIT_S, _TIMES_OWN * self._took_s)):
            return False
        self._in_vain += 1
        return True

    def begin(self, each: VisibleStep) -> None:
        """From here on all nodes see that the step is begun, before a byte of it is there."""
        name = f"{_BEGUN}{secrets.token_hex(8)}.tmp"
        self._target.create(f"{step_attempt_folder(each.step, each.attempt)}/{name}", b"")
        crashpoints.point("copy.begun")

    def sent(self, copied: Copied, seconds: float) -> None:
        """This node has sent its part of a step: that it is begun is seen by this from now on."""
        if copied.outcome is Outcome.PART:
            self._took_s = seconds
            self._sent_s[VisibleStep(copied.step, copied.attempt)] = time.monotonic()
        folder = step_attempt_folder(copied.step, copied.attempt)
        for each in self._target.list(folder):
            if each.name.startswith(_BEGUN):
                with suppress(OSError):
                    self._target.remove(f"{folder}/{each.name}")

    def remove_stale(self, begun: Sequence[Begun], ours: AttemptName) -> None:
        """What was begun, was followed by another, and has not grown for long never will, unless a sender
        shows that it is at it: it goes as retention takes a step, so that who is at it after all finds its
        tombstone. To be asked right after the look that found them: one that is whole since then stays.
        OSError."""
        now = time.monotonic()
        passed_s, self._looked_s = min(now - self._looked_s, _LONGEST_COUNTED_S), now
        for each in begun[1:]:
            before, still_s = self._still.get(each.at, (None, 0.0))
            is_still = before is not None and (before.files, before.marks) == (each.files, each.marks)
            still_s = still_s + passed_s if is_still else 0.0
            self._still[each.at] = each, still_s
            gone_s = max(_LEAST_GONE_S, _TIMES_OWN_GONE * self._took_s, holds_s(each.marks))
            if still_s >= gone_s:
                retention.bury(
                    self._target,
                    each.at.step,
                    each.at.attempt,
                    lambda: newest_claimed(self._target.at_once()) == ours,
                    leaves_whole=True,
                )
