"""The commands of README.md work in a new environment that has torch and nothing else, and leave no rubbish behind.

Which commands run: those in blocks that begin with ```bash, line by line, in their order, in one shell that starts in a
checkout. A backslash at the end of a line continues it. A ```python block after a paragraph with "Save as `NAME`" is
saved under that name in an empty folder, and the shell goes there. Nothing in other blocks (```text for example) runs.

Which lines of a ```bash block do not run: those with a comment that says what they need, "# needs a GPU" for example,
and those that begin with "make ", whose targets .ci/run makes.

Torch itself, with what it requires, is a folder of links into this environment. Objects that the checkout's build has
made are copied instead of compiled again. All other packages come from pip's index.
"""

import dataclasses
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from pages import README, blocks
from patience import HANG_S
from scripts import ROOT, is_built

from fusedcomm.version import __version__, minor

pytestmark = pytest.mark.check

OBJECTS = "build/objects"


@dataclasses.dataclass(frozen=True)
class Saved:
    """A script that README asks to save."""

    name: str
    text: str


def steps_of(page: Path) -> list[str | Saved]:
    """The commands to run and the scripts to save, in their order."""
    steps: list[str | Saved] = []
    for block in blocks(page):
        save_as = re.search(r"Save as `([\w.]+)`", block.before)
        if block.language == "python" and save_as:
            steps.append(Saved(save_as[1], block.code))
        elif block.language == "bash":
            steps += [line for line in block.commands if re.match(r"(?!make )(?!.*# needs )", line)]
    return steps


def test_the_readme_has_commands_and_scripts():
    steps = steps_of(README)
    begins = ("pip install --no-build-isolation", "fusedcomm probe", "torchrun --standalone")
    for begin in begins:
        assert any(step.startswith(begin) for step in steps if isinstance(step, str)), begin
    assert [step.name for step in steps if isinstance(step, Saved)] == ["train.py"]


def required(name: str) -> dict[str, importlib.metadata.Distribution]:
    """An installed package and all that it requires here, by name."""
    found: dict[str, importlib.metadata.Distribution] = {}
    names = [name]
    while names:
        distribution = importlib.metadata.distribution(names.pop())
        if distribution.name not in found:
            found[distribution.name] = distribution
            requirements = map(Requirement, distribution.requires or [])
            names += [r.name for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]
    return found


def link_torch(folder: Path, scripts: Path) -> None:
    """Makes a folder from which torch, and what it requires, can be imported, and torch's commands in `scripts`."""
    folder.mkdir()
    for distribution in required("torch").values():
        for name in {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
            if not (folder / name).exists():
                (folder / name).symlink_to(Path(str(distribution.locate_file(name))))
    for command in importlib.metadata.distribution("torch").entry_points.select(group="console_scripts"):
        path = scripts / command.name
        path.write_text(f"#!{scripts}/python\nfrom {command.module} import {command.attr}\n{command.attr}()\n")
        path.chmod(0o755)


def reusing_compiler(path: Path, checkout: Path) -> Path:
    """A C++ compiler that copies what this checkout's build has made of a source of `checkout`."""
    compiler = os.environ.get("CXX", "").strip() or "c++"
    path.write_text(
        "#!/bin/bash\n"
        'words=("$@") object=\n'
        "for ((i = 0; i < $#; i++)); do [[ ${words[i]} == -o ]] && object=${words[i + 1]}; done\n"
        f"made={shlex.quote(str(ROOT / OBJECTS))}/${{object#{shlex.quote(str(checkout / OBJECTS))}/}}\n"
        f'if [[ $object == *.o && -f $made ]]; then cp "$made" "$object"; else exec {compiler} "$@"; fi\n'
    )
    path.chmod(0o755)
    return path


@dataclasses.dataclass
class NewEnvironment:
    """An environment with torch and nothing else, and a checkout in which nothing has been built."""

    folder: Path

    def __post_init__(self) -> None:
        self.checkout, self.scripts = self.folder / "checkout", self.folder / "env" / "bin"
        subprocess.run([sys.executable, "-m", "venv", self.folder / "env"], check=True)
        [site_packages] = self.folder.glob("env/lib/python*/site-packages")
        link_torch(self.folder / "torch-alone", self.scripts)
        (site_packages / "torch.pth").write_text(f"{self.folder / 'torch-alone'}\n")
        self.checkout.mkdir()
        for name in ("LICENSE", "README.md", "pyproject.toml", "setup.py"):
            shutil.copy(ROOT / name, self.checkout)
        left_out = shutil.ignore_patterns("_C.*", "__pycache__")
        for name in ("csrc", "fusedcomm", "kernels"):
            shutil.copytree(ROOT / name, self.checkout / name, symlinks=True, ignore=left_out)
        (self.checkout / "fusedcomm/kernels").unlink(missing_ok=True)  # where VENV is empty, the Makefile links it

    def run(self, script: str) -> subprocess.CompletedProcess:
        """Runs a script of bash in the checkout. The first command that fails ends it. Both streams are in `stdout`."""
        ours = ("PYTHON", "PYTEST", "FUSEDCOMM", "TRITON", "MAKE", "MFLAGS", "VIRTUAL_ENV")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        # Commands of the environment that runs this test must not stand in for what is missing in the new one.
        path = [entry for entry in os.environ["PATH"].split(":") if not self._is_of_this_environment(entry)]
        environment |= {"PATH": ":".join([str(self.scripts), *path]), "VIRTUAL_ENV": str(self.scripts.parent)}
        if (ROOT / OBJECTS).is_dir() and is_built():
            environment["CXX"] = str(reusing_compiler(self.folder / "c++", self.checkout))
        pip = 'pip() { command pip "$@" $([[ $1 == install ]] && echo "${PIP_ARGS:-}"); }\n'
        return subprocess.run(
            ["bash", "-euo", "pipefail", "-c", pip + script],
            cwd=self.checkout,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=2 * HANG_S,  # a script installs, may build, and trains
        )

    def files(self) -> set[str]:
        """Everything in the checkout but what the next build uses."""
        paths = (path.relative_to(self.checkout) for path in self.checkout.rglob("*") if not path.is_dir())
        return {str(path) for path in paths if path.parts[:2] not in (("build", "objects"), ("build", "units"))}

    @staticmethod
    def _is_of_this_environment(entry: str) -> bool:
        return sys.prefix != sys.base_prefix and Path(entry).is_relative_to(sys.prefix)


@pytest.fixture(scope="module")
def new(tmp_path_factory) -> Iterator[NewEnvironment]:
    environment = NewEnvironment(tmp_path_factory.mktemp("new"))
    yield environment
    shutil.rmtree(environment.folder)


INSTALLED = """
import importlib.metadata, json, fusedcomm.version as version
found = importlib.metadata.metadata("fusedcomm")
files = [path.name for path in importlib.metadata.files("fusedcomm")]
for_types = [name for name in ("_C.pyi", "py.typed") if name in files]
requires = [text for text in found.get_all("Requires-Dist") if "extra" not in text]
license = [found["License-Expression"], files.count("LICENSE")]
print(json.dumps([found["Version"], requires, *license, for_types, version.built_for()]))
"""


@pytest.mark.alone
@pytest.mark.full
def test_the_commands_work_where_only_torch_is(new):
    before = new.files()
    script = ""
    for number, step in enumerate(steps_of(README)):
        if isinstance(step, Saved):
            folder = new.folder / f"saved-{number}"
            folder.mkdir()
            (folder / step.name).write_text(step.text)
            script += f"cd {shlex.quote(str(folder))}\n"
        else:
            command = step.replace("/tmp/", f"{new.folder}/tmp/")
            script += f"printf '\\n== %s s: %s\\n' $SECONDS {shlex.quote(command)}\n{command}\n"
    (new.folder / "tmp").mkdir()
    done = new.run(script)
    print(done.stdout)
    assert done.returncode == 0
    assert new.files() == before

    torch = importlib.metadata.version("torch")
    done = new.run(f"cd / && pip check && python -c {shlex.quote(INSTALLED)}")
    assert done.returncode == 0, done.stdout
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == [__version__, [f"torch=={minor(torch)}.*"], "Apache-2.0", 1, ["_C.pyi", "py.typed"], torch]
