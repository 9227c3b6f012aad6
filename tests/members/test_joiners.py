"""Ranks that join, whatever happens to them or to the members meanwhile; joiners and strangers that are sent away."""

import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from patience import HANG_S, patient, wait_until
from processes import listening_ports
from trainees import SHAPES, Endless

import fusedcomm
from fusedcomm.members.errors import JoinRefusedError, TooFewRanksError
from fusedcomm.members.plane.view import View
from fusedcomm.ranks import agreement

pytestmark = pytest.mark.check


def test_a_rank_that_joins_has_the_others_bits_and_its_gradients_count(team):
    run = team(num_founders=2, num_steps=40, meets=4, hold={"0": 12})
    run.join("j", of="1")
    first = run.read("j", "ready")["step"]
    assert first > 0
    run.check_means(range(max(0, first - 3), first), of=["0", "1"])
    run.check_means(range(first, 12), of=["0", "1", "j"])
    run.signal(signal.SIGKILL, "0")  # whose state the joiner has
    run.check_means(range(12, 40), of=["1", "j"])


@pytest.mark.parametrize("die", [{"j": (1, "connecting")}, {"0": (2, "connecting")}], ids=str)
def test_a_rank_that_is_lost_as_the_view_of_a_joiner_connects_holds_up_nobody(team, die):
    run = team(num_founders=2, num_steps=1000, meets=4, die=die)
    run.join("j", of="1")
    left = [name for name in ("0", "1", "j") if name not in die]
    first = run.read("j", "ready")["step"] if "j" in left else 0
    run.check_means(range(first, first + 12), of=left)
    assert run.read("1", f"step.{first + 11}")["view"] > 1  # the joiner has been a member


def test_a_joiner_that_dies_as_it_is_proposed_holds_up_nobody(team):
    run = team(num_founders=2, hold={"0": 4, "1": 4}, die={"j": (0, "proposed")})
    run.join("j", of="1")
    run.processes["j"].join(HANG_S)
    run.go()
    run.check_means(range(8), of=["0", "1"])


def test_a_joiner_that_heard_of_a_death_does_not_go_on_joining(team):
    """It is a member when those that it has asked to join are gone."""
    silence = patient(1)
    run = team(Endless, silence=silence)
    run.wait_steps("0", "1", "2")
    run.signal(signal.SIGKILL, "2")
    run.wait_steps("0", "1")
    run.join("a", of="0")
    run.wait_steps("0", "1", "a")
    run.join("b", of="a")
    run.wait_steps("0", "1", "a", "b")
    run.signal(signal.SIGKILL, "0", "1")
    gone = time.monotonic()
    while time.monotonic() - gone < 3 * silence:  # a joiner gives up after twice `silence`
        run.wait_steps("a", "b")
    run.check_steps()


def test_the_member_leaves_that_was_to_take_a_joiner_in(plane):
    member, joiner = plane("the job", silence_s=0.5), plane(None, silence_s=0.5)
    member.start(View(0, (member.member,), 0))
    with ThreadPoolExecutor() as pool:
        joined = pool.submit(lambda: joiner.install(joiner.join(member.address, {}).view, HANG_S))
        wait_until(lambda: joiner.job_name, "the joiner is welcomed")
        member.leave("it has ended")  # before or after the joiner is in its view, which is not active yet
        with pytest.raises(
            RuntimeError, match="no member could be reached to join|0 .it has left: it has ended"
        ) as error:
            joined.result(HANG_S)
    assert isinstance(error.value, (JoinRefusedError, TooFewRanksError))


def join(address: str, shapes=SHAPES, **options) -> None:
    """Joins in this process. Raises JoinRefusedError."""
    before = listening_ports()
    members = fusedcomm.Members(join=address)
    parameters = [(f"p{i}", torch.nn.Parameter(torch.zeros(shape))) for i, shape in enumerate(shapes)]
    options = {"config": fusedcomm.Config("int8"), "bucket_mib": 1e-6, **options}
    try:
        fusedcomm.GradReducer(parameters, members=members, quiet=True, **options)
    finally:
        members.leave()
        assert listening_ports() == before


def strangers(address: tuple[str, int]) -> list[socket.socket]:
    """Open connections that send random bytes, a request of HTTP, a huge length, the begin of a frame, and nothing."""
    sent = (os.urandom(4096), b"GET / HTTP/1.1\r\n\r\n", b"fcM1" + b"\xff" * 40, b"fcM1", b"")
    connections = []
    for some in 12 * sent:
        connections.append(socket.create_connection(address))
        connections[-1].sendall(some)
    return connections


def test_others_than_fitting_joiners_are_sent_away_and_nobody_waits_for_them(team, tmp_path, monkeypatch):
    run = team(num_founders=2, num_steps=9, hold={"0": 4}, meets=5, die={"j": (0, "receiving")})
    address = run.read("1", "ready")["address"]
    host, _, port = address.rpartition(":")
    connections = strangers((host, int(port)))
    with pytest.raises(JoinRefusedError, match="parameters.* on the members' ranks and .* on this one") as error:
        join(address, shapes=((40, 33), (64, 32)))
    told = str(error.value)
    assert told.startswith("fusedcomm: the member at ") and "Start it with the model" in told
    with pytest.raises(JoinRefusedError, match="do not agree: config"):
        join(address, config=fusedcomm.Config("bf16"))
    with pytest.raises(JoinRefusedError, match="do not agree: reducer.bucket_mib is"):
        join(address, bucket_mib=1)
    versions = agreement.versions()["versions"]
    for field in versions:
        others = {"versions": {**versions, field: "another"}}
        with (
            monkeypatch.context() as patch,
            pytest.raises(
                JoinRefusedError, match=f"versions.{field} is .* on the members' ranks and 'another' on this one"
            ),
        ):
            patch.setattr(agreement, "versions", lambda found=others: found)
            join(address)
    run.join("j", of="1")
    run.go()
    for name in "01":
        assert len(run.read(name, "step.8")["means"]) == len(SHAPES), run.read(name, "end")
    printed = (tmp_path / "1.printed").read_text()
    assert "fusedcomm: members refused a connection from 127.0.0.1:" in printed
    assert printed.count("\n") <= 20  # a line for each of the first ones, and for no more
    for connection in connections:
        connection.close()
