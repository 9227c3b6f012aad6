"""Child processes that compile kernels with Triton, because Triton may interpret in this one."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest


def environment(triton_folder: Path | None = None) -> dict[str, str]:
    """The environment of a process that compiles, with the Triton in a folder before any other. None: the installed
    Triton."""
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if triton_folder is not None:
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, (str(triton_folder), variables.get("PYTHONPATH"))))
    return variables


def oldest_triton(config: pytest.Config) -> Path:
    """The folder with the oldest supported Triton. Skips the test if there is none."""
    folder = Path(config.getoption("--oldest-triton") or Path(sys.prefix) / "triton-oldest")
    if not (folder / "triton").is_dir():
        pytest.skip(f"no Triton in {folder}: `make check` installs the oldest there, or name one with --oldest-triton")
    return folder


class Child:
    """A Python program that answers each line with a line. It starts with the first request.

    command: the program's file and its arguments. triton_folder: as for environment().
    """

    def __init__(self, *command: str, triton_folder: Path | None = None) -> None:
        self._command, self._folder = command, triton_folder

    @functools.cached_property
    def _process(self) -> subprocess.Popen:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        return subprocess.Popen([sys.executable, *self._command], env=environment(self._folder), **pipes)

    def ask(self, line: str) -> str:
        """The answer. Raises RuntimeError if the program has ended; its traceback is on stderr."""
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the compiler ended at {line}: see its traceback above")
        return answer

    def close(self) -> None:
        """Ends the program, if it was started."""
        if "_process" in self.__dict__:
            self._process.communicate()
