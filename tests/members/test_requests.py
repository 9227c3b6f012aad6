"""Requests between members, of which all are in this process; and forked children, which are no members."""

import os
import socket
import threading
import time

import pytest
from patience import HANG_S

from fusedcomm.members.control import ControlPlane
from fusedcomm.members.errors import MemberLostError
from fusedcomm.members.view import View


@pytest.fixture
def planes():
    """Three founders that have started."""
    made = [
        ControlPlane(f"u{rank}", {"rank": rank}, min_ranks=1, job="j", silence_s=20, host="127.0.0.1")
        for rank in range(3)
    ]
    view = View(0, tuple(plane.member for plane in made), 5)
    for plane in made:
        plane.handlers["double"] = lambda header: ({"twice": 2 * header["value"]}, [b"ab", memoryview(b"cd")])
        plane.start(view)
    yield made
    for plane in made:
        plane.close()


def test_an_answer_has_a_header_and_a_payload(planes):
    memory = memoryview(bytearray(10))
    for _ in range(3):  # over one connection
        header, payload = planes[0].request(planes[2].member, "double", {"value": -4}, memory)
        assert (header["twice"], bytes(payload), bytes(memory)) == (-8, b"abcd", b"abcd" + bytes(6))
    assert bytes(planes[2].request(planes[0].member, "double", {"value": 1})[1]) == b"abcd"


def test_requests_run_side_by_side(planes):
    together = threading.Barrier(4)
    planes[1].handlers["meet"] = lambda header: ({"first": together.wait(HANG_S) == 0}, [])
    found = []
    asking = [
        threading.Thread(target=lambda: found.append(planes[0].request(planes[1].member, "meet", {})[0]["first"]))
        for _ in range(4)
    ]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join(HANG_S)
    assert sorted(found) == [False, False, False, True]


def test_a_refusal_has_the_members_text(planes):
    def refuse(header):
        raise LookupError("step 3 is not kept")

    planes[1].handlers["means"] = refuse
    planes[1].handlers["broken"] = lambda header: header["nothing"] and ({}, [])
    with pytest.raises(LookupError, match="^step 3 is not kept$"):
        planes[0].request(planes[1].member, "means", {})
    with pytest.raises(LookupError, match="answers no 'what'"):
        planes[0].request(planes[1].member, "what", {})


def test_a_request_ends_when_the_member_is_lost(planes):
    asked, over = threading.Event(), threading.Event()

    def hang(header):
        asked.set()
        over.wait(HANG_S)
        return {}, []

    planes[1].handlers["hang"] = hang
    threading.Thread(target=lambda: (asked.wait(HANG_S), planes[1].leave("it goes")), daemon=True).start()
    with pytest.raises(MemberLostError, match="'hang' was asked of the member at 127.0.0.1:"):
        planes[0].request(planes[1].member, "hang", {})
    over.set()
    decision = planes[0].recover()
    assert [member.uid for member in decision.lost] == ["u1"]
    with pytest.raises(MemberLostError):
        planes[0].request(planes[1].member, "double", {"value": 1})


def test_a_goodbye_is_noticed_at_once_and_steps_stop(planes):
    stops = [threading.Event() for _ in planes]
    for plane, stop in zip(planes, stops, strict=True):
        plane.on_freeze = stop.set
        assert plane.boundary(5) is None
    assert planes[0].finish_step(5)
    planes[2].leave("it is done")
    planes[2].leave("it is done")
    for plane, stop in zip(planes[:2], stops, strict=False):
        assert stop.wait(HANG_S)
        assert not plane.finish_step(6)
        decision = plane.recover()
        assert decision.finished == {"u0": 5, "u1": 4}
        assert decision.view.step == 6
    installed = [threading.Thread(target=plane.install, args=(decision.view, HANG_S)) for plane in planes[:2]]
    for thread in installed:
        thread.start()
    for thread in installed:
        thread.join(HANG_S)
    for plane in planes[:2]:
        plane.installed(decision.view)
        assert plane.boundary(6) is None
        assert plane.finish_step(6)


def test_a_forked_child_is_no_member(planes):
    """A data loader's process inherits the sockets; it must not keep a dead member's port open."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            planes[0].boundary(6)
        except RuntimeError:
            os.write(writer, b"refused")
        os.close(writer)
        time.sleep(HANG_S)
        os._exit(0)
    try:
        os.close(writer)
        assert os.read(reader, 10) == b"refused"
        address = (planes[0].member.host, planes[0].member.port)
        planes[0].close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, timeout=HANG_S)
        assert [member.uid for member in planes[1].recover().lost] == ["u0"]
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        os.close(reader)


@pytest.mark.parametrize("options", [{"min_ranks": 0}, {"silence_s": 0.0}])
def test_impossible_options_are_refused(options):
    with pytest.raises(ValueError, match="is not possible: use"):
        ControlPlane("u", {}, **{"min_ranks": 1, "job": "j", "host": "127.0.0.1", **options})
