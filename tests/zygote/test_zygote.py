"""What is forked is as if it had been started: in what it has, in how it ends, and in what is left of it."""

import json
import os
import tempfile

import pytest

from tests import zygote
from tests.descriptors import readable
from tests.zygote import PIPE, Zygote, ZygoteError
from tests.zygote.specimen import ENDS

pytestmark = pytest.mark.process

SPECIMEN = "tests.zygote.specimen"


def ended(end: str, *, fresh: bool, **how: object) -> tuple[int, list[str], str]:
    """Its status, the lines that it printed and its last words."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = zygote.start([SPECIMEN, end], fresh=fresh, stdin=PIPE, stdout=out, stderr=err, **how)
        with process.stdin:
            process.stdin.write("one\ntwo")
        status = process.wait(120)
        out.seek(0)
        err.seek(0)
        return status, out.read().splitlines(), err.read()


@pytest.mark.parametrize("leads", [True, False])
def test_it_has_what_a_started_program_has(leads: bool) -> None:
    environment = {**os.environ, "FLASHCKPT_OF_ITS_OWN": "ä"}
    environment.pop("PYTEST_CURRENT_TEST")
    told = []
    for fresh in (True, False):
        status, out, err = ended("returns", fresh=fresh, env=environment, start_new_session=leads)
        assert (status, err) == (0, "")
        assert out[1:] == ["a thread's end", "at its end"]
        told.append(json.loads(out[0]))
    assert told[1] == told[0]
    assert told[1]["descriptors"] == [0, 1, 2]
    assert told[1]["threads"] == ["MainThread"]
    assert told[1]["environment"]["FLASHCKPT_OF_ITS_OWN"] == "ä"
    assert "PYTEST_CURRENT_TEST" not in told[1]["environment"]
    assert told[1]["leads"] == [leads, leads]
    assert told[1]["read"] == "one\ntwo"


@pytest.mark.parametrize("end", ENDS)
def test_it_ends_as_a_started_program_ends(end: str) -> None:
    (status, out, err), (expected, expected_out, expected_err) = (
        ended(end, fresh=fresh) for fresh in (False, True)
    )
    assert status == expected
    assert out[1:] == expected_out[1:]
    # The frames above the program's are others.
    assert err.splitlines()[-1:] == expected_err.splitlines()[-1:]


def test_what_is_left_to_chance_is() -> None:
    drawn = [json.loads(zygote.shared().run([SPECIMEN, "draws"]).stdout.splitlines()[1]) for _ in range(2)]
    assert len({*drawn[0], *drawn[1]}) == 4


def test_it_is_armed_as_a_started_program_is() -> None:
    environment = {**os.environ, "FLASHCKPT_CRASH_AT": "no.such.point"}
    # The point is read when the library is imported, which it is here long before.
    done = zygote.shared().run([SPECIMEN, "returns"], env=environment)
    assert done.returncode == 1
    assert "names no point" in done.stderr


@pytest.mark.parametrize("name", ["PYTHONHASHSEED", "OMP_NUM_THREADS", "LD_PRELOAD"])
def test_what_only_a_start_reads_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        zygote.shared().start([SPECIMEN, "returns"], env={**os.environ, name: "3"})


def test_nothing_of_it_is_left_when_it_is_closed() -> None:
    made = Zygote(())
    with tempfile.TemporaryFile() as out:
        pids = [made.start(["tests.zygote.standing"], stdout=out).pid for _ in range(2)]
        ends = [os.pidfd_open(pid) for pid in (made.pid, *pids)]
    made.close()
    for end in ends:
        assert readable(end, timeout_s=0)
        os.close(end)
    with pytest.raises(ZygoteError):
        made.start([SPECIMEN, "returns"])
