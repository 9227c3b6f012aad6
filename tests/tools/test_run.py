"""`fusedcomm run` gives each rank its place, and ends all when one fails."""

import os
import sys

import pytest

from fusedcomm.tools import cli
from fusedcomm.tools.errors import UsageError
from fusedcomm.tools.run import places

PRINTED = "import os; print(*(os.environ['HOROVOD_' + name] for name in {names}), flush=True)"
NAMES = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")


def test_each_rank_gets_its_place(capfd):
    program = PRINTED.format(names=NAMES)
    assert cli.main(["run", "-np", "3", "-H", "localhost:2,127.0.0.1:1", sys.executable, "-c", program]) == 0
    lines = sorted(capfd.readouterr().out.splitlines())
    assert lines == ["0 3 0 2 0 2", "1 3 1 2 0 1", "2 3 0 1 1 2"]


def test_a_rank_that_fails_ends_all_and_gives_its_status(capfd):
    program = "import os, sys, time; sys.exit(7) if os.environ['HOROVOD_RANK'] == '1' else time.sleep(600)"
    assert cli.main(["run", "-np", "2", sys.executable, "-c", program]) == 7
    assert "rank 1 on localhost has failed with exit status 7" in capfd.readouterr().err


def test_another_host_is_asked_whether_it_lives(capfd, monkeypatch, tmp_path):
    """By ssh itself: a host that is cut off would otherwise count as running for as long as TCP likes."""
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\necho "$@" | head -1\nfor last; do :; done\nsh -c "$last"\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert cli.main(["run", "-np", "1", "-H", "elsewhere:1", "true"]) == 0
    assert "-o BatchMode=yes -o ServerAliveInterval=10 elsewhere cd " in capfd.readouterr().out


def test_hosts_are_filled_in_their_order():
    assert places("one:2,two", 3) == ["one", "one", "two"]
    assert places(None, 2) == ["localhost"] * 2


@pytest.mark.parametrize(
    ("hosts", "said"),
    [
        ("one:2", "2 slots, too few"),
        ("one:x", "host:slots"),
        (":2", "host:slots"),
        ("-oProxyCommand=x:4", "host:slots"),
    ],
)
def test_hosts_that_are_not_possible_are_named(hosts, said):
    with pytest.raises(UsageError, match=said):
        places(hosts, 3)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-np", "2"], "no command"),
        (["-np", "2", "--min-np", "1", "true"], "need --elastic"),
        (["-np", "2", "--reset-limit", "0", "true"], "need --elastic"),
        (["-np", "2", "--elastic", "--min-np", "3", "true"], "more than -np 2"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(capsys, arguments, said):
    with pytest.raises(SystemExit):
        cli.main(["run", *arguments])
    assert said in capsys.readouterr().err
