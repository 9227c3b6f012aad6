"""Requests between members, of which all are in this process; and forked children, which are no members."""

import os
import socket
import threading
import time

import pytest
from patience import HANG_S

from fusedcomm.members.errors import MemberLostError
from fusedcomm.members.plane.view import View


@pytest.fixture
def planes(plane):
    """Three founders that have started."""
    made = [plane("job", uid=f"u{rank}") for rank in range(3)]
    view = View(0, tuple(each.member for each in made), 5)
    for each in made:
        each.start(view)
    return made


def test_requests_run_side_by_side(planes):
    together = threading.Barrier(4)
    planes[1].hooks.handlers["meet"] = lambda header: ({"first": together.wait(HANG_S) == 0}, [])
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

    planes[1].hooks.handlers["means"] = refuse
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

    planes[1].hooks.handlers["hang"] = hang
    threading.Thread(target=lambda: (asked.wait(HANG_S), planes[1].leave("it goes")), daemon=True).start()
    with pytest.raises(MemberLostError, match="'hang' was asked of the member at 127.0.0.1:"):
        planes[0].request(planes[1].member, "hang", {})
    over.set()
    assert [member.uid for member in planes[0].recover().lost] == ["u1"]
    with pytest.raises(MemberLostError):
        planes[0].request(planes[1].member, "hang", {})


def test_a_step_does_not_count_once_a_member_has_said_goodbye(planes):
    stops = [threading.Event() for _ in planes]
    for each, stop in zip(planes, stops, strict=True):
        each.hooks.stop_step = stop.set
        assert each.boundary(5) is None
    assert planes[0].barrier.finish_step(5)
    planes[2].leave("it is done")
    for each, stop in zip(planes[:2], stops, strict=False):
        assert stop.wait(HANG_S) and not each.barrier.finish_step(6)
        assert each.recover().finished == {"u0": 5, "u1": 4}


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
