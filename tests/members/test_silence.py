"""Processes that stand still, strangers, and joiners that are refused or die."""

import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from crew import Crew
from patience import HANG_S
from sampling import few

from fusedcomm.members.control import ControlPlane
from fusedcomm.members.errors import JoinRefusedError
from fusedcomm.members.view import View

pytestmark = pytest.mark.check


def test_a_process_that_stood_still_is_expelled(tmp_path):
    with Crew(tmp_path, 3, silence_s=1.5) as crew:
        crew.wait_steps(["m0", "m1", "m2"], 3)
        crew.signal("m0", signal.SIGSTOP)
        crew.wait_steps(["m1", "m2"], 2)
        crew.signal("m0", signal.SIGCONT)
        error = crew.wait_error("m0")
        assert error["kind"] == "ExpelledError"
        assert "it stood still for " in error["text"] and "and silence is 1.5 s" in error["text"]
        assert "holds Python's interpreter: then give Members(silence=…) more" in error["text"]
        crew.wait_steps(["m1", "m2"], 2)


@pytest.mark.full
def test_a_short_stop_expels_nobody(tmp_path):
    with Crew(tmp_path, 3, silence_s=4.0) as crew:
        crew.wait_steps(["m0", "m1", "m2"], 3)
        crew.signal("m1", signal.SIGSTOP)
        time.sleep(1.5)
        crew.signal("m1", signal.SIGCONT)
        crew.wait_steps(["m0", "m1", "m2"], 3)
        assert len(crew.events("m0", "view")) == 1


def test_of_two_the_higher_rank_stops_by_name_when_the_lower_is_silent(tmp_path):
    with Crew(tmp_path, 2, silence_s=1.0) as crew:
        crew.wait_steps(["m0", "m1"], 2)
        crew.signal("m0", signal.SIGSTOP)
        error = crew.wait_error("m1")
        assert error["kind"] == "MinorityError"
        assert "silent ranks 0 " in error["text"]


def test_too_few_stop(tmp_path):
    with Crew(tmp_path, 3, min_ranks=3) as crew:
        crew.wait_steps(["m0", "m1", "m2"], 3)
        crew.kill("m1")
        for name in ("m0", "m2"):
            error = crew.wait_error(name)
            assert error["kind"] == "TooFewRanksError"
            assert "2 of 3 members of view 0 are left, and min_ranks is 3" in error["text"]


def test_strangers_disturb_nobody(tmp_path):
    with Crew(tmp_path, 2) as crew:
        crew.wait_steps(["m0", "m1"], 2)
        host, _, port = crew.address("m0").rpartition(":")
        strangers = [socket.create_connection((host, int(port))) for _ in range(60)]
        said = [b"GET / HTTP/1.1\r\n\r\n", b"fcM1" + b"\xff" * 20, b"", b"fcM1"]
        for stranger, words in zip(strangers, 15 * said, strict=True):
            stranger.sendall(words)
        for stranger in strangers[::4]:
            stranger.settimeout(60)
            try:
                assert stranger.recv(1) == b""
            except ConnectionResetError:
                pass
        crew.wait_steps(["m0", "m1"], 2)
        assert len(crew.events("m0", "view")) == 1
    printed = (tmp_path / "m0.out").read_text()
    assert "fusedcomm: members refused a connection from 127.0.0.1:" in printed
    assert printed.count("\n") <= 20  # a line for each of the first ones, and for no more


def test_a_joiner_is_refused_with_the_members_reason(tmp_path):
    with Crew(tmp_path, 2) as crew:
        crew.wait_steps(["m0", "m1"], 2)
        crew.join("j0", by="m1", check={"refuse": "another model"})
        error = crew.wait_error("j0")
        assert error["kind"] == "JoinRefusedError" and error["text"].endswith(": another model")
        crew.wait_steps(["m0", "m1"], 2)


@pytest.mark.parametrize("killed", few(["j0", "m0", "m1"], "j0", "m0"))
def test_a_process_dies_while_one_is_taken_in(tmp_path, killed):
    with Crew(tmp_path, 3, pause_in_install_s=0.5) as crew:
        crew.wait_steps(["m0", "m1", "m2"], 3)
        crew.join("j0", by="m2")
        left = [name for name in ("m0", "m1", "m2", "j0") if name != killed]
        crew.wait(lambda: crew.events(left[0], "view")[1:] and crew.events("j0", "view"), "the view is committed")
        crew.kill(killed)
        crew.wait_steps(left, 3)


def test_a_joiner_dies_before_it_is_taken_in(tmp_path):
    with Crew(tmp_path, 2, step_s=0.3) as crew:
        crew.wait_steps(["m0", "m1"], 2, more=1)
        crew.join("j0", by="m1")
        crew.address("j0")
        crew.kill("j0")
        crew.wait_steps(["m0", "m1"], 2, more=4)


def test_a_joiner_that_heard_of_a_death_does_not_go_on_joining(tmp_path):
    """It is a member when those that it has asked to join are gone."""
    with Crew(tmp_path, 3, silence_s=0.5) as crew:
        crew.wait_steps(["m0", "m1", "m2"], 3)
        crew.kill("m2")
        crew.wait_steps(["m0", "m1"], 2)
        crew.join("j0", by="m0", silence_s=0.5)
        crew.wait_steps(["m0", "m1", "j0"], 3)
        crew.join("j1", by="j0")
        crew.wait_steps(["m0", "m1", "j0", "j1"], 4)
        crew.kill("m0", "m1")
        crew.wait_steps(["j0", "j1"], 2)
        gone = time.monotonic()
        while time.monotonic() - gone < 3 * 2 * 0.5:  # a joiner gives up after twice `silence_s`
            crew.wait_steps(["j0", "j1"], 2)


def test_the_member_leaves_that_was_to_take_a_joiner_in():
    options = {"min_ranks": 1, "silence_s": 0.5, "host": "127.0.0.1"}
    member = ControlPlane("member", {}, job="the job", **options)
    member.start(View(0, (member.member,), 0))
    joiner = ControlPlane("joiner", {}, job=None, **options)
    with ThreadPoolExecutor() as pool:
        joined = pool.submit(joiner.join, member.address, {})
        try:
            while not joiner.job_name:  # which it learns as it is welcomed
                time.sleep(0.01)
            member.leave("it has ended")  # its main thread is at no boundary between steps, so the joiner still waits
            with pytest.raises(JoinRefusedError, match="no member could be reached to join"):
                joined.result(HANG_S)
        finally:
            joiner.leave("the test ends")
