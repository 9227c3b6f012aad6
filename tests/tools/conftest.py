"""Fixtures of the tests of the commands."""

import os

import pytest


@pytest.fixture
def ssh(tmp_path, monkeypatch):
    """Makes `ssh` a script, which gets ssh's arguments. Without one it does here what ssh does on the other host."""

    def install(script: str = 'for last; do :; done; exec sh -c "$last"') -> None:
        program = tmp_path / "ssh"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return install
