"""What Members(join="auto") does: begins training or joins, as the launcher says, and whom it asks."""

import contextlib
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from processes import listening_ports

import fusedcomm
from fusedcomm.members.errors import JoinRefusedError
from fusedcomm.members.plane import addresses
from fusedcomm.members.plane.addresses import Answer, MembersFile, ask, name_of, to_join
from fusedcomm.members.plane.control import ControlPlane
from fusedcomm.members.plane.listener import MAX_STRANGERS
from fusedcomm.members.plane.view import View

HOST = "127.0.0.1"
VARIABLES = ("FUSEDCOMM_MEMBERS", "FUSEDCOMM_JOIN", "TORCHELASTIC_RESTART_COUNT")


@pytest.fixture
def say(monkeypatch):
    """say(members=…, join=…, restarts=…) sets the variables; the others are not set."""

    def set_variables(members=None, join=None, restarts=None) -> None:
        for name, value in zip(VARIABLES, (members, join, restarts), strict=True):
            monkeypatch.delenv(name, raising=False)
            if value is not None:
                monkeypatch.setenv(name, str(value))

    monkeypatch.setattr(addresses, "AGAIN_S", 0.01)
    set_variables()
    return set_variables


@pytest.fixture
def file(tmp_path):
    return MembersFile(tmp_path / "members")


@pytest.fixture
def process(plane):
    """process(job, trains): a process of a job that trains, or is about to; without a job it waits to join."""

    def make(job: str | None, trains: bool = True) -> ControlPlane:
        made = plane(job)
        if job is None:
            threading.Thread(target=_join_nobody, args=(made,), daemon=True).start()
        elif trains:
            made.start(View(0, (made.member,), 0))
        return made

    return make


def _join_nobody(waits: ControlPlane) -> None:
    with contextlib.suppress(RuntimeError):  # nobody answers, or the test has ended
        waits.join(unused(), {})


def unused() -> str:
    """An address where nobody listens."""
    with socket.create_server((HOST, 0)) as server:
        return f"{HOST}:{server.getsockname()[1]}"


def state_of(plane: ControlPlane, wanted: str) -> Answer:
    """Asks until the process has the state."""
    while (answer := ask([plane.address])[plane.address]).state != wanted:
        pass
    return answer


def test_processes_say_whether_they_train_and_in_which_job_and_strangers_and_dead_addresses_nothing(
    process, monkeypatch
):
    monkeypatch.setattr(addresses, "ANSWER_S", 0.2)
    member = process("one")
    assert state_of(member, "trains") == Answer("trains", name_of("one"))
    assert state_of(process("one", trains=False), "begins").is_member
    assert not state_of(process(None), "joins").is_member
    with socket.create_server((HOST, 0)) as silent, socket.create_server((HOST, 0)) as talks:

        def talk() -> None:
            connection, _ = talks.accept()
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 9999999999999999\r\n\r\n")

        threading.Thread(target=talk, daemon=True).start()
        others = [f"{HOST}:{server.getsockname()[1]}" for server in (silent, talks)]
        assert list(ask([*others, unused(), "no address", member.address])) == [member.address]


def test_as_many_founders_as_there_are_may_dial_at_once_and_strangers_beside_them_give_way(plane):
    listening = plane("job")
    listening.hooks.num_founders = 40
    host, port = addresses.split(listening.address)
    with contextlib.ExitStack() as opened:

        def dial(number: int) -> list[socket.socket]:
            made = [opened.enter_context(socket.create_connection((host, port))) for _ in range(number)]
            assert ask([listening.address])  # so those before it have been taken in
            return made

        oldest, *_ = dial(MAX_STRANGERS + 39)
        oldest.setblocking(False)
        with pytest.raises(BlockingIOError):  # it is open, and nothing was said
            oldest.recv(1)
        dial(1)
        oldest.setblocking(True)
        with contextlib.suppress(ConnectionResetError):
            assert oldest.recv(1) == b""


@pytest.mark.parametrize(
    ("members", "join", "restarts", "joins"),
    [
        (None, None, None, False),
        (None, 0, 3, False),
        ("file", None, 0, False),
        ("file", None, 1, True),
        ("file", 0, 1, False),
        ("file", 1, None, True),
        ("address", None, None, True),
        ("address", None, 2, True),
        ("address", 1, None, True),
    ],
)
def test_the_launcher_says_who_joins(say, process, file, members, join, restarts, joins):
    plane = process("one")
    file.note([plane.address], name_of("one"))
    say({"file": str(file.path), "address": plane.address}.get(members), join, restarts)
    assert to_join(0) == (plane.address if joins else None)


@pytest.mark.parametrize(
    ("members", "join", "restarts", "kind", "said"),
    [
        (None, None, 1, RuntimeError, "FUSEDCOMM_MEMBERS does not say where"),
        (None, 1, None, RuntimeError, "FUSEDCOMM_MEMBERS does not say where"),
        ("10.0.0.7:1", 0, None, ValueError, "leave out one, or name"),
        ("members", None, None, ValueError, "'members' is no address"),
        ("10.0.0.7:port", 1, None, ValueError, "'10.0.0.7:port' is no address"),
        ("./members", "yes", None, ValueError, "FUSEDCOMM_JOIN='yes' is not possible"),
    ],
)
def test_variables_that_do_not_say_it_are_named(say, members, join, restarts, kind, said):
    say(members, join, restarts)
    with pytest.raises(kind, match=said):
        to_join(0)


def test_a_process_that_begins_without_a_launcher_is_told_what_is_missing(say, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RuntimeError, match="RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT is not set: start the script"):
        fusedcomm.Members(join="auto")


def test_a_process_that_joins_finds_a_living_member_among_stale_lines(say, process, file):
    """The port of a lost member may belong to another job by now."""
    other, one, begins = process("another"), process("one"), process(None)
    state_of(begins, "joins")
    file.note([unused(), other.address, begins.address], name_of("one"))
    file.note([unused(), one.address], name_of("one"))
    say(str(file.path), 1)
    assert to_join(0) == one.address


def test_without_an_answer_and_with_those_of_two_jobs_a_process_ends_and_begins_nothing(say, process, file):
    say(str(file.path), 1)
    with pytest.raises(JoinRefusedError, match="^fusedcomm: .*no address is noted.*FUSEDCOMM_JOIN=0"):
        to_join(0)
    waits, dead, one, two = process(None), unused(), process("one"), process("two")
    state_of(waits, "joins")
    file.note([dead, waits.address], name_of("one"))
    with pytest.raises(JoinRefusedError, match=f"asked: {dead}, {waits.address}|asked: {waits.address}, {dead}"):
        to_join(0)
    say(f"{one.address},{two.address}")
    with pytest.raises(JoinRefusedError, match=f"several trainings answer.*{one.address} of job {name_of('one')}"):
        to_join(0)


def test_of_several_addresses_one_whose_name_is_gone_keeps_nobody_from_joining(process, monkeypatch):
    known, member = socket.getaddrinfo, process("one")

    def getaddrinfo(host, *more, **options):
        if host == "gone":
            raise socket.gaierror("Name or service not known")
        return known(host, *more, **options)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    with fusedcomm.Members(join=f"gone:1,{member.address}") as joiner:
        assert joiner.address.startswith(f"{HOST}:")
        assert joiner.plane.join(joiner.joins, {}).view.number == 1
    with fusedcomm.Members(join="gone:1") as joiner, pytest.raises(JoinRefusedError, match="'gone:1' is no address"):
        joiner.plane.join(joiner.joins, {})


def test_training_does_not_begin_with_the_file_of_one_that_runs(process, file):
    addresses.refuse_a_running_job(file)
    file.note([unused()], name_of("one"))
    addresses.refuse_a_running_job(file)
    plane = process("one")
    file.note([plane.address], name_of("one"))
    with pytest.raises(RuntimeError, match=f"training that runs: {plane.address} answer. .*FUSEDCOMM_JOIN=1"):
        addresses.refuse_a_running_job(file)


def test_processes_that_wait_to_join_do_not_wait_for_each_other(process, plane):
    waits = process(None)
    state_of(waits, "joins")
    with pytest.raises(JoinRefusedError, match="no member, but a process that joins"):
        plane(None, silence_s=0.2).join(waits.address, {})


def test_a_file_has_the_newest_job_and_no_line_twice(file):
    assert file.read() == []
    file.note(["a:1"], "")
    file.note(["b:1", "c:1"], name_of("old"))
    file.note(["b:1", "[::1]:2"], name_of("new"))
    file.note(["b:1", "d:4"], name_of("new"))
    with open(file.path, "a") as opened:
        opened.write("e:1 0123\nnothing\n\nf:2 0123456789abcdef more\ng:1 01234567")
    assert [noted.address for noted in file.read()] == ["d:4", "[::1]:2", "b:1", "a:1"]
    file.note(["h:1"], name_of("new"))  # after a line that was not whole
    assert file.read()[0].address == "h:1" and len(file.path.read_text().splitlines()) == 12


def test_a_file_that_cannot_be_written_or_is_a_folder_is_named(tmp_path, say):
    with pytest.raises(RuntimeError, match="FUSEDCOMM_MEMBERS='.*none/members'.*No such file"):
        MembersFile(tmp_path / "none" / "members").note([], "")
    say(members=tmp_path / "none" / "members")
    before = listening_ports()
    with pytest.raises(RuntimeError, match="No such file") as kept:  # with it all that the call has made
        fusedcomm.Members(join=unused())
    assert kept and listening_ports() == before
    say(members=tmp_path, join=1)
    for call in (lambda: addresses.refuse_a_running_job(MembersFile(tmp_path)), lambda: to_join(0.1)):
        with pytest.raises(RuntimeError, match=f"cannot be read from FUSEDCOMM_MEMBERS='{tmp_path}': .*Is a directory"):
            call()


def test_many_processes_note_whole_lines(file):
    wanted = [[f"host{thread}:{number}" for number in range(50)] for thread in range(4)]

    def note(some: list[str]) -> None:
        for address in some:
            file.note([address], name_of("one"))

    with ThreadPoolExecutor(len(wanted)) as threads:
        list(threads.map(note, wanted))
    assert sorted(noted.address for noted in file.read()) == sorted(sum(wanted, []))
