"""Fixtures of the tests of the commands."""

import os

import pytest

from fusedcomm.ranks import own_address


def need_other_hosts() -> None:
    if set(own_address.candidates()) == {"127.0.0.1"}:
        pytest.skip("needs an address that other hosts could reach, and this machine has none")


@pytest.fixture
def other_hosts():
    need_other_hosts()


@pytest.fixture
def ssh(tmp_path, monkeypatch):
    """Makes `ssh` a script, which gets ssh's arguments. Without one it does here what ssh does on the other host."""

    def install(script: str = 'for last; do :; done; exec sh -c "$last"') -> None:
        need_other_hosts()
        program = tmp_path / "ssh"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return install
