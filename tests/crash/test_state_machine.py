"""Save, be killed, damage, branch, prune, load, in any order: what is visible and what loads follows from it.

A state machine over the run's folder alone, in one process: a kill is an exception that nothing survives,
at a system call of the store. Real processes are killed in the tests beside this one.
"""

import os
import shutil
import tempfile
from pathlib import Path
from random import Random
from unittest import mock

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import flashckpt
from flashckpt.commit import commit_step, lineage, steps
from flashckpt.commit.attempts import mark_ended, settle
from flashckpt.commit.lineage import branch
from flashckpt.commit.verification import verify
from flashckpt.commit.view import View
from flashckpt.errors import DamagedError, NoSuchStepError
from flashckpt.format.names import AttemptName, CommitName
from flashckpt.options import Keep
from flashckpt.recovery.recover import recover
from flashckpt.store.local import LocalStore
from tests.commit.runs import attempt_at, folder_of, is_whole, name_of, new_run, publish
from tests.crash.mortal import MortalSystem
from tests.run_view import damaged

KEEP = Keep(last=2)


class Killed(BaseException):
    """The process is gone: nothing after it runs, no clean-up either."""


class Mortal(MortalSystem):
    """Lives for so many calls, then never does one again."""

    def __init__(self, calls: int) -> None:
        self._left = calls

    def live(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise Killed


IMMORTAL = 1 << 30
LIVES = st.one_of(st.just(IMMORTAL), st.integers(0, 60))


class Life(RuleBasedStateMachine):
    """The model: `committed` are the steps that must be there, each with its attempt; `unsure` those that a
    kill may have cut short; `damaged` those whose bytes were changed; `lineage` what the newest attempt
    went on from, as (attempt, last step that counts)."""

    def __init__(self) -> None:
        super().__init__()
        # In memory where there is one: this is about the order of things, not about a disk.
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self._folder = tempfile.mkdtemp(prefix="flashckpt-test-", dir=memory)
        self.path = f"{self._folder}/run"
        self._environment = mock.patch.dict(os.environ, {"FLASHCKPT_RUNTIME": self._folder})
        self._environment.start()
        self.store = new_run(self.path)
        self.committed: set[CommitName] = set()
        self.unsure: set[CommitName] = set()
        self.begun: set[CommitName] = set()
        self.damaged: set[CommitName] = set()
        self.lineage: list[tuple[AttemptName, int]] = []
        self.attempt: AttemptName | None = None
        self.step = 0

    def teardown(self) -> None:
        self._environment.stop()
        shutil.rmtree(self._folder)

    # ---- what happens

    @precondition(lambda self: self.attempt is None)
    @rule()
    def start(self) -> None:
        """The next attempt loads the newest step that is whole, as a resume does, and goes on from it."""
        settle(View.of(self.store))
        best = self._load()
        expected = max(self._seen() - self.damaged, default=None)
        assert best == expected
        if best is None and self._seen():
            return  # every step is damaged: a resume stops here, it never starts afresh
        self._go_on(best)

    @precondition(lambda self: self.attempt is not None)
    @rule(gap=st.integers(1, 3), calls=LIVES)
    def save(self, gap: int, calls: int) -> None:
        """With retention: the newest that are complete stay, two in all; and nothing goes but older ones."""
        assert self.attempt is not None
        self.step += gap
        quarantined = set(damaged(self.store))
        seen = sorted(self._complete() - quarantined)
        store, each = LocalStore(self.path, Mortal(calls)), name_of(self.step, self.attempt)
        self.unsure.add(each)
        self.begun.add(each)
        try:
            part = publish(store, self.step, self.attempt)
            assert commit_step.commit(View.of(store), folder_of(store, part.id), KEEP)
        except Killed:
            self.attempt = None
        else:
            self.unsure.discard(each)
            self.committed.add(each)
        self._look_what_went(may_go=set(seen[:-1]) | quarantined)

    @rule(calls=LIVES)
    def collect(self, calls: int) -> None:
        """Any process deletes garbage, at any time: no step goes."""
        try:
            store = LocalStore(self.path, Mortal(calls))
            commit_step.collect(store, View.of(store).catalogue)
        except Killed:
            pass
        self._look_what_went(may_go=set())

    def _look_what_went(self, may_go: set[CommitName]) -> None:
        there = set(View.of(self.store).checkpoints)
        left = set(filter(self._is_complete, there))
        went = self.committed - left - self.damaged
        assert went <= may_go, "a step that had to stay went"
        self.committed -= went
        self.damaged &= there
        self.committed = {each for each in self.committed if each in left or each in self.damaged}

    @rule()
    def be_killed(self) -> None:
        self.attempt = None

    @precondition(lambda self: self.attempt is None and self._seen())
    @rule(pick=st.randoms(use_true_random=False))
    def branch(self, pick: Random) -> None:
        each = pick.choice(sorted(self._seen()))
        try:
            made = branch(self.store, each.step)
        except (DamagedError, NoSuchStepError):
            assert each in self.damaged, "a step that is whole can be branched from"
            return
        self._lineage_at(made, each)

    @precondition(lambda self: self.committed - self.damaged)
    @rule(pick=st.randoms(use_true_random=False), how=st.sampled_from(["flip", "cut", "remove", "swap"]))
    def damage(self, pick: Random, how: str) -> None:
        """One file of a committed step: its manifest, its part or its shard."""
        each = pick.choice(sorted(self.committed - self.damaged))
        root = Path(self.path)
        path = pick.choice(sorted((root / folder_of(self.store, each.id).path).glob("[!.]*")))
        data = bytearray(path.read_bytes())
        if how == "flip":
            data[pick.randrange(len(data))] ^= 1 << pick.randrange(8)
            path.write_bytes(data)
        elif how == "cut":
            path.write_bytes(data[: pick.randrange(len(data))])
        elif how == "remove":
            path.unlink()
        else:
            kind = path.name.partition("-")[0]
            others = [other for other in root.glob(f"data/*/*/{kind}-*") if other != path]
            others = [other for other in others if other.read_bytes() != bytes(data)]
            if not others:
                return
            path.write_bytes(pick.choice(sorted(others)).read_bytes())
        self.damaged.add(each)

    @precondition(lambda self: self.attempt is None)
    @rule()
    def recover(self) -> None:
        """It names the step that the next start loads, and deletes nothing that is whole."""
        newest = View.of(self.store).attempt
        if newest is not None:
            mark_ended(self.store, newest, "dead")  # a keeper's last word: nobody need be watched
        report = recover(self.store)
        # It commits what a kill has cut off just before its manifest.
        self.committed |= {each for each in self.begun if self._is_complete(each)}
        expected = max(self._seen() - self.damaged, default=None)
        named = report.resume
        assert (None if named is None else (named.step, named.attempt)) == (
            None if expected is None else (expected.step, expected.attempt)
        )

    # ---- what holds after each

    @invariant()
    def what_is_whole_is_visible_and_verifies(self) -> None:
        seen = set(View.of(self.store).visible())
        must = {each for each in self._seen() if each not in self.damaged and each not in self.unsure}
        hidden = {each for each in must if not any(o.step == each.step for o in seen)}
        assert not hidden, "committed, whole, and not visible"
        for each in seen - self.damaged:
            assert is_whole(self.store, each.step, each.attempt)

    @invariant()
    def what_is_visible_was_committed(self) -> None:
        for each in View.of(self.store).visible():
            assert each in self.committed | self.unsure
            assert any(each.attempt == of and each.step <= last for of, last in self.lineage)

    @invariant()
    def damage_is_named(self) -> None:
        """Every damaged step that is looked at is in the report, and no other."""
        found = {row.name for row in verify(self.store).damaged}
        assert found <= self.damaged
        assert found >= set(View.of(self.store).visible()) & self.damaged

    # ---- the model

    def _seen(self) -> set[CommitName]:
        """What must be visible if it is whole; what is unsure is looked up: it may be either."""
        self._settle()
        last = dict(self.lineage)
        return {each for each in self.committed if each.step <= last.get(each.attempt, -1)}

    def _settle(self) -> None:
        for each in list(self.unsure):
            # A start, a branch or a recovery may still commit it.
            if each.attempt != self.attempt and self._is_complete(each):
                self.unsure.discard(each)
                self.committed.add(each)

    def _complete(self) -> set[CommitName]:
        return {each for each in self._seen() if self._is_complete(each)}

    def _is_complete(self, each: CommitName) -> bool:
        return steps.is_whole(View.of(self.store), each)

    def _load(self) -> CommitName | None:
        """A resume's rule: candidates in their order, each verified whole before it is taken."""
        for each in [each.name for each in lineage.next_start(View.of(self.store)).candidates]:
            refusal = ""
            try:
                leaves = flashckpt.load(self.path, each.step)
            except (DamagedError, NoSuchStepError) as error:
                refusal = str(error)
                lineage.quarantine(self.store, each, lineage.this_host(), refusal)
            assert bool(refusal) == (each in self.damaged), refusal or "damage reached a tensor"
            if not refusal:
                assert leaves["optimizer.step"].item() == each.step
                return each
        return None

    def _go_on(self, best: CommitName | None) -> None:
        self.attempt = attempt_at(self.store, best)
        self._lineage_at(self.attempt, best)
        self.step = best.step if best is not None else 0

    def _lineage_at(self, newest: AttemptName, best: CommitName | None) -> None:
        """As docs/commit.md says it: the bound is the minimum along the way."""
        old = self.lineage if best is not None else []
        start = next(
            (i for i, (of, _) in enumerate(old) if best is not None and of == best.attempt), len(old)
        )
        step = best.step if best is not None else 0
        self.lineage = [(newest, 1 << 40), *((of, min(last, step)) for of, last in old[start:])]


TestLife = Life.TestCase
TestLife.settings = settings(
    max_examples=30, stateful_step_count=25, deadline=None, derandomize=True, print_blob=True
)
