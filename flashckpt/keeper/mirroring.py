"""When the remote gets its next step: how often, again after what failed, and for how long a keeper that
would leave stays for it.

Owns the order of copies and their worker, whom nothing here waits for. What a copy is, tiers/mirror.py says.
Of several nodes with one folder the keeper of the lowest rank's copies, and it alone deletes in it: no other
knows what is being copied. Where nodes have folders of their own, each sends its part of the same steps, and
looks at the remote again and again for what another has begun there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from functools import partial

from flashckpt.commit.lineage import VisibleStep
from flashckpt.errors import FlashckptError
from flashckpt.format.names import AttemptName
from flashckpt.keeper.protocol import RemoteStatus
from flashckpt.keeper.trainers import Trainer
from flashckpt.options import Remote, duration_s
from flashckpt.persist.job import look_again_s, pause_s
from flashckpt.persist.ledger import Event, Ledger
from flashckpt.persist.worker import Worker
from flashckpt.store.base import Store
from flashckpt.tiers.mirror import Mirror, Mirrored
from flashckpt.tiers.step_copy import Copied, Outcome

log = logging.getLogger(__name__)

# Once nobody trains: the keeper stays for it.
_LONGEST_LAST_PAUSE_S = 5.0
_LOOK_S = 1.0
_LONGEST_LAST_LOOK_S = 1.0
_MOST_TEXT = 400


class Mirroring:
    """`count` is told what was done and how often. For one thread, but for `copying`."""

    def __init__(self, store: Store, wake: int, ledger: Ledger, count: Callable[[str, int], None]) -> None:
        self._store, self._wake, self._ledger, self._count = store, wake, ledger, count
        self._remote: Remote | None = None
        self._ranks: tuple[int, ...] = ()
        self._is_living = False
        self._attempt: AttemptName | None = None
        self._mirror: Mirror | None = None
        self._worker: Worker | None = None
        self._linger_s = self._grace_s = 0.0
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Nothing is known of what the remote has."""
        self._there: VisibleStep | None = None  # the newest in the remote
        self._error, self._tries, self._failed_s = "", 0, 0.0
        self._hopeless: VisibleStep | None | bool = False  # what the last try failed to copy for good
        self._due_s = 0.0
        self._stays_since: float | None = None
        self._moved = 0.0, 0
        # Where other nodes send parts of the same steps.
        self._waits, self._files, self._looks = False, 0, 0
        self._look_anew()

    def _look_anew(self) -> None:
        """An attempt has come: what it goes on from, and whether the remote has that, is to be found out."""
        self._is_unknown, self._look_s = True, 0.0
        # Of what was committed here since: the newest, the one to be copied next, the one that is being
        # copied, the one that was.
        self._newest: VisibleStep | None = None
        self._wanted: VisibleStep | None = None
        self._taken: VisibleStep | None = None
        self._handled: VisibleStep | None = None
        # The one of which this node has sent its part last, which those of others may not be beside yet.
        self._sent: VisibleStep | None = None

    @property
    def spared(self) -> VisibleStep | None:
        """The step that is being copied now, and is to stay. May be asked by any thread."""
        mirror = self._mirror
        return None if mirror is None else mirror.spared

    @property
    def _is_ours(self) -> bool:
        """Whether this keeper copies from the run's folder: as long as that is not known rank 0's does."""
        is_known = self._mirror is not None and self._mirror.is_ours is not None
        return bool(self._mirror and self._mirror.is_ours) if is_known else 0 in self._ranks

    @property
    def _is_joint(self) -> bool:
        return self._mirror is not None and self._mirror.is_joint

    @property
    def leaves_deletions(self) -> bool:
        """Whether another node's keeper copies from this folder, and deletes in it."""
        return self._remote is not None and not self._is_ours

    # What is said and heard

    def know(self, trainers: Iterable[Trainer]) -> None:
        """Who trains. The newest attempt says where its steps go; what it said holds after its end."""
        named = [each for each in trainers if each.attempt is not None]
        self._is_living = bool(named)
        if not named:
            return
        self._stays_since = None
        newest = max(named, key=lambda each: (each.attempt or AttemptName(0, ""), -each.rank))
        self._linger_s, self._grace_s = newest.linger_s, newest.grace_s
        if (newest.remote, newest.ranks) != (self._remote, self._ranks):
            self._remote, self._ranks = newest.remote, newest.ranks
            self._begin_anew()
            self._mirror = self._worker = None  # one that hangs in its store is left there
            if self._remote is not None:
                self._mirror = Mirror(self._store, self._remote, self._ranks)
                self._worker = Worker("mirror", self._wake)
        elif newest.attempt != self._attempt:
            self._look_anew()
        self._attempt = newest.attempt

    def committed(self, step: int, attempt: AttemptName) -> None:
        """A step is committed here, by all ranks that commit here."""
        each, newest = VisibleStep(step, attempt), self._newest
        if self._mirror is None or (
            newest is not None and (attempt.number, step) <= (newest.attempt.number, newest.step)
        ):
            return
        self._newest, self._looks, self._look_s = each, 0, min(self._look_s, time.monotonic())
        if self._is_joint and not self._begins:
            return
        there = max((each for each in (self._sent, self._there) if each is not None), default=None)
        last = self._wanted or self._taken or there
        if self._is_due(None if last is None else last.step, step):
            self._replace_wanted(each)

    def _replace_wanted(self, each: VisibleStep) -> None:
        """The newest wins. Where only time says how often, nothing else was due. What a look is copying,
        begun before its commit was told, is not skipped."""
        is_copied = self._mirror is not None and self._wanted == self._mirror.copying
        if self._wanted is not None and not is_copied and not isinstance(self._every, str):
            self._count("mirror_skipped", 1)
        self._wanted = each

    @property
    def _begins(self) -> bool:
        """Whether this keeper begins steps, of which others send their parts: the last of all each may."""
        return 0 in self._ranks or not self._is_living

    @property
    def _every(self) -> str | int | None:
        return None if self._remote is None else self._remote.every

    def _is_due(self, last: int | None, step: int) -> bool:
        """By its number, after the last that was due. Once nobody trains every one is: nothing follows."""
        if isinstance(self._every, int) and self._is_living:
            return step // self._every > (last or 0) // self._every
        return True

    # What is done

    def next(self, now: float) -> None:
        """Collect what was done, and begin the next copy, if none is under way and one is due."""
        mirror, worker = self._mirror, self._worker
        if mirror is None or worker is None:
            return
        worker.collect()
        if mirror.is_ours is False and not self._is_unknown:
            return
        if not self._is_living and self._wanted is None and not self._is_last_handled:
            self._wanted = self._newest
        is_wanted = self._wanted is not None and (now >= self._due_s or not self._is_living)
        looks = (self._is_unknown or self._is_joint) and now >= self._look_s
        is_due = looks or (is_wanted and not self._is_joint)
        if worker.busy or now < self._failed_s + self._pause_s or not is_due:
            return
        begins, looks = self._begins and (is_wanted or self._is_unknown), looks and self._is_unknown
        wanted = None
        if is_wanted or not self._is_joint:
            wanted, self._wanted = self._wanted, None
        self._taken, self._is_unknown = wanted, False

        def done(found: Mirrored | BaseException) -> None:
            self._taken = None
            if isinstance(found, BaseException):
                self._failed(found, wanted, looked=looks)
            else:
                self._done(found, wanted, time.monotonic() - now)

        how = {"begins": begins, "is_last": not self._is_living}
        worker.submit(partial(mirror.bring, wanted, self._is_due, **how), done)

    @property
    def _pause_s(self) -> float:
        if not self._tries:
            return 0.0
        return pause_s(self._tries) if self._is_living else min(pause_s(self._tries), _LONGEST_LAST_PAUSE_S)

    @property
    def _is_last_handled(self) -> bool:
        if self._is_joint and self._newest is not None:
            # That this node has sent its part is not enough.
            return self._there is not None and self._there >= self._newest
        return self._newest in (None, self._taken, self._there, self._handled)

    def _done(self, found: Mirrored, wanted: VisibleStep | None, seconds: float) -> None:
        self._handled = wanted
        if self._is_joint:
            self._met(found, wanted)
        self._there = found.newest
        if self._wanted == self._there:
            self._wanted = None  # a look found it before its commit was told
        self._error, self._tries, self._hopeless = "", 0, False
        is_nobodys = self._mirror is not None and self._mirror.is_ours is None
        if found.of != self._attempt and (self._is_living or is_nobodys):
            # It has not said yet what it goes on from: the remote is to know that, too.
            self._is_unknown, self._look_s = True, time.monotonic() + _LOOK_S
        if self._remote is None:
            return
        self._note_pruned(found, self._remote.url)
        if found.copied is not None:
            self._note_copied(found.copied, self._remote, seconds)

    def _note_copied(self, copied: Copied, remote: Remote, seconds: float) -> None:
        if isinstance(remote.every, str):
            self._due_s = time.monotonic() - seconds + duration_s(remote.every, "remote_every")
        about = {"remote": remote.url, "step": copied.step}
        if copied.outcome in (Outcome.COPIED, Outcome.PART):
            self._count("mirrored", 1)
            self._count("mirrored_bytes", copied.sent_bytes)
        sizes = {"num_bytes": copied.num_bytes, "sent_bytes": copied.sent_bytes}
        how = {"outcome": copied.outcome.value, "seconds": round(seconds, 4)}
        self._ledger.add(str(copied.attempt), Event.MIRROR, **about, **sizes, **how)

    def _note_pruned(self, found: Mirrored, url: str) -> None:
        attempt = None if found.of is None else str(found.of)
        if found.pruned:
            self._ledger.add(attempt, Event.PRUNE, remote=url, steps=list(found.pruned))
        if found.problem:
            problem = found.problem[:_MOST_TEXT]
            self._ledger.add(attempt, Event.ERROR, what="mirror prune", message=problem, remote=url)

    def _met(self, found: Mirrored, wanted: VisibleStep | None) -> None:
        """Where other nodes send parts, too: when the remote is looked at again."""
        now = time.monotonic()
        if found.copied is not None:
            self._sent = VisibleStep(found.copied.step, found.copied.attempt)
        if found.copied is not None or (found.newest, found.files) != (self._there, self._files):
            self._looks = 0
            self._moved = now, self._moved[1]  # another node is at it
        self._waits, self._files, self._looks = found.waits, found.files, self._looks + 1
        pause = look_again_s(self._looks)
        self._look_s = now + (pause if self._is_living else min(pause, _LONGEST_LAST_LOOK_S))
        if found.is_put_off and wanted is not None and self._wanted is None:
            self._wanted = wanted

    def _failed(self, error: BaseException, wanted: VisibleStep | None, *, looked: bool) -> None:
        self._tries, self._failed_s = self._tries + 1, time.monotonic()
        self._is_unknown = self._is_unknown or looked
        newer = self._wanted
        self._wanted = wanted
        if newer is not None:
            self._replace_wanted(newer)
        self._count("mirror_failed", 1)
        is_ours = isinstance(error, FlashckptError)
        message = (str(error) if is_ours else f"{type(error).__name__}: {error}")[:_MOST_TEXT]
        # A server that is away has many words for it; what is for good is said in those of its own.
        is_news = not self._error or (is_ours and message != self._error)
        # What is for good with another step, which a node has begun, says nothing of the one that is wanted.
        step = error.step if isinstance(error, FlashckptError) else None
        is_about = wanted is None or step in (None, wanted.step)
        self._error, self._hopeless = message, wanted if is_ours and is_about else False
        if is_news:
            log.warning("nothing is copied to the remote: %s", message)
            self._say(message, wanted)

    def _say(self, message: str, step: VisibleStep | None) -> None:
        attempt = None if self._attempt is None else str(self._attempt)
        about = {} if step is None else {"step": step.step}
        url = None if self._remote is None else self._remote.url
        self._ledger.add(attempt, Event.ERROR, what="mirror", remote=url, message=message, **about)

    # At the end

    @property
    def _is_behind(self) -> bool:
        if self._mirror is None or self._worker is None or self._mirror.is_ours is False:
            return False
        if self._mirror.is_ours is None and 0 not in self._ranks:
            return self._newest is not None  # whose it is to copy that is still to be found out
        if self._is_joint and not self._is_unknown:
            # The worker looks at the remote even where there is nothing to do.
            if self._is_living:
                return self._waits or self._wanted is not None or self._mirror.copying is not None
            return self._waits or not self._is_last_handled
        is_at_it = self._worker.busy or self._is_unknown or self._wanted is not None
        return is_at_it or not self._is_last_handled

    def holds(self, now: float) -> bool:
        """Whether a keeper that would leave stays for the last step: for `linger` (or the grace, where that
        is longer) at most, for the grace while nothing is sent, and not where it has failed for good."""
        mirror, worker = self._mirror, self._worker
        if mirror is None or worker is None or not self._is_behind:
            return False
        last = self._newest if self._wanted is None else self._wanted
        if self._hopeless is not False and self._hopeless == last and not worker.busy:
            return False
        progress = mirror.progress_bytes
        if self._stays_since is None:
            self._stays_since, self._moved = now, (now, progress)
        if progress != self._moved[1]:
            self._moved = now, progress
        until = self._stays_since + max(self._linger_s, self._grace_s)
        return now < min(until, self._moved[0] + self._grace_s)

    def leave(self) -> None:
        """The keeper goes: what did not arrive is said."""
        if self._remote is None or not self._is_behind:
            return
        last = "What was committed last" if self._newest is None else f"Step {self._newest.step}, the last,"
        there = "Nothing is known to be" if self._there is None else f"Step {self._there.step} is the newest"
        why = self._error or "it took too long"
        message = f"{last} did not reach {self._remote.url}: {why}. {there} there"
        log.warning("%s", message)
        self._say(message, self._newest)

    def status(self) -> RemoteStatus | None:
        """None where this keeper copies nothing."""
        if self._mirror is None or self._remote is None or not self._is_ours:
            return None
        copying = self._mirror.copying
        return RemoteStatus(
            url=self._remote.url,
            newest=-1 if self._there is None else self._there.step,
            copying=-1 if copying is None else copying.step,
            waits=self._is_behind,
            error=self._error,
            progress_bytes=self._mirror.progress_bytes,
        )
