"""The layers of csrc/, fusedcomm/ and kernels/: no #include and no import goes to a higher layer or closes a circle."""

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# The layers of csrc/, top to bottom. A layer includes only itself and lower layers.
CSRC = ("bindings", "frontends", "gradients", "watch", "engine", "devices", "transport", "codec", "lanes", "wire")
# The layers of csrc/ that must not use torch.
WITHOUT_TORCH = ("engine", "codec", "lanes", "wire")

# The layers of fusedcomm/ and kernels/, top to bottom.
FUSEDCOMM = (
    "__main__",
    "tools",
    "horovod",
    "__init__",
    "integrations",
    "attaching",
    "fsdp",
    "ddp",
    "optimizer",
    "reducer",
    "local_steps",
    "members",
    "simulation",
    "autotune",
    "session",
    "trace",
    "devices",
    "chunks",
    "config",
    "patterns",
    "ranks",
    "kernels",
    "env",
    "files",
    "memory",
    "log",
    "native",
    "literals",
    "version",
    "_C",
)

# The front ends, in csrc/frontends/ and in fusedcomm/. What two of them need lives below them, in csrc/gradients/ and
# in fusedcomm/session/.
FRONT_ENDS = ("ddp", "reducer", "horovod")
# These, and those that are written in Python alone.
PYTHON_FRONT_ENDS = (*FRONT_ENDS, "fsdp", "local_steps")

Arrow = tuple[str, str]
"""A file or module, and one that it includes or imports."""


def upward(arrows: list[Arrow], layers: tuple[str, ...], layer_of) -> list[str]:
    """A text for each arrow to a higher layer; empty if there is none. `layers` are ordered from top to bottom."""
    found = []
    for source, target in arrows:
        above, below = layer_of(source), layer_of(target)
        for name in (above, below):
            assert name in layers, f"{source} → {target}: {name} is no layer of {', '.join(layers)}"
        if layers.index(below) < layers.index(above):
            found.append(f"{source} → {target}: {above} stands below {below}")
    return found


def circle(arrows: list[Arrow]) -> list[str]:
    """The files of one circle in their order, with the first one again at the end; empty if there is no circle."""
    targets: dict[str, list[str]] = {}
    for source, target in arrows:
        if source != target:
            targets.setdefault(source, []).append(target)
    done: set[str] = set()

    def follow(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name not in done:
            for target in targets.get(name, ()):
                if found := follow(target, [*path, name]):
                    return found
            done.add(name)
        return []

    return next(filter(None, (follow(name, []) for name in targets)), [])


def includes(folder: Path) -> list[Arrow]:
    return [
        (str(path.relative_to(folder)), name)
        for path in sorted(folder.rglob("*"))
        if path.suffix in (".h", ".cpp")
        for name in re.findall(r'^\s*#\s*include "([^"]+)"', path.read_text(), re.M)
    ]


def imports(path: Path, module: str) -> Iterator[str]:
    """The fusedcomm modules that a module imports anywhere in its code, except under TYPE_CHECKING."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    tree = ast.parse(path.read_text())
    skipped = {
        id(node)
        for check in ast.walk(tree)
        if isinstance(check, ast.If) and isinstance(check.test, ast.Name) and check.test.id == "TYPE_CHECKING"
        for node in ast.walk(check)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "fusedcomm")
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            if base.split(".")[0] == "fusedcomm":
                yield from (f"{base}.{alias.name}" for alias in node.names)


def modules() -> dict[str, Path]:
    found = {}
    for folder, package in ((ROOT / "fusedcomm", "fusedcomm"), (ROOT / "kernels", "fusedcomm.kernels")):
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            if folder.name == "fusedcomm" and parts[0] == "kernels":
                continue  # a link to kernels/
            found[".".join([package, *(part for part in parts if part != "__init__")])] = path
    return found


def python_arrows() -> list[Arrow]:
    known = modules()
    arrows = []
    for module, path in known.items():
        for name in imports(path, module):
            while name not in known and name != "fusedcomm._C":
                name = name.rpartition(".")[0]
            arrows.append((module, name))
    return arrows


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def among_sisters(arrows: list[Arrow], front_end_of) -> list[str]:
    """A text for each arrow from one front end to another. `front_end_of` returns None for what is in none."""
    ends = [(source, target, front_end_of(source), front_end_of(target)) for source, target in arrows]
    return [f"{source} → {target}: a front end uses a sister" for source, target, a, b in ends if a and b and a != b]


def native_front_end(name: str) -> str | None:
    match = re.match(r"frontends/(\w+)/", name)
    return match[1] if match else None


def python_front_end(module: str) -> str | None:
    return room_of(module) if room_of(module) in PYTHON_FRONT_ENDS else None


def naming_c10d(files: dict[str, str]) -> list[str]:
    """The files of gradients/ that name c10d's transport; `files`: text by path."""
    return [n for n, text in files.items() if n.startswith("gradients/") and re.search("c10d_?transport", text, re.I)]


def test_no_include_runs_upward_or_in_a_circle():
    arrows = includes(ROOT / "csrc")
    assert len(arrows) > 100
    assert upward(arrows, CSRC, lambda name: name.split("/")[0]) == []
    assert circle(arrows) == []


def test_the_engine_knows_no_torch():
    """The sanitizers build the engine without torch."""
    for layer in WITHOUT_TORCH:
        for path in (ROOT / "csrc" / layer).rglob("*"):
            if path.is_file():
                assert not re.search(r"#\s*include <(torch|ATen|c10|pybind11)", path.read_text()), path


def test_only_the_ddp_front_end_knows_ddps_buckets():
    named = [
        str(path.relative_to(ROOT / "csrc"))
        for path in (ROOT / "csrc").rglob("*")
        if path.is_file() and re.search(r"\bGradBucket\b", path.read_text())
    ]
    assert [name for name in named if not name.startswith("frontends/ddp/")] == []


def test_no_import_runs_upward_or_in_a_circle():
    arrows = python_arrows()
    assert len(arrows) > 200
    assert upward(arrows, FUSEDCOMM, room_of) == []
    assert circle(arrows) == []


def test_no_front_end_uses_a_sister():
    assert {native_front_end(path) for path, _ in includes(ROOT / "csrc")} == {None, *FRONT_ENDS}
    assert among_sisters(includes(ROOT / "csrc"), native_front_end) == []
    assert among_sisters(python_arrows(), python_front_end) == []


def test_the_gradients_know_no_certain_transport():
    paths = [path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".h", ".cpp")]
    assert naming_c10d({str(path.relative_to(ROOT / "csrc")): path.read_text() for path in paths}) == []


def test_a_sister_and_a_certain_transport_are_found():
    arrows = [("frontends/ddp/a.h", "frontends/horovod/b.h"), ("frontends/ddp/a.h", "gradients/bucket.h")]
    assert among_sisters(arrows, native_front_end) == [
        "frontends/ddp/a.h → frontends/horovod/b.h: a front end uses a sister"
    ]
    arrows = [("fusedcomm.fsdp.comm", "fusedcomm.ddp"), ("fusedcomm.fsdp.comm", "fusedcomm.fsdp.mesh")]
    assert among_sisters(arrows, python_front_end) == ["fusedcomm.fsdp.comm → fusedcomm.ddp: a front end uses a sister"]
    used = "std::shared_ptr<C10dTransport> transport"
    assert naming_c10d({"gradients/a.h": used, "bindings/b.cpp": used}) == ["gradients/a.h"]


def test_training_imports_no_tool():
    arrows = python_arrows()
    assert [a for a in arrows if room_of(a[1]) == "tools" and room_of(a[0]) not in ("tools", "__main__")] == []


# Private names of torch's that fusedcomm also has for something of its own.
TORCHS = {"_ddp", "_get_backend", "_modules", "_parameters", "_values", "_world"}


def private_names(tree: ast.AST) -> set[str]:
    """The private attributes, methods and variables that a module defines."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


def foreign_private_names(trees: dict[str, ast.AST]) -> list[str]:
    """Where a module uses a private name of another one: each use of an attribute that it does not define itself."""
    of_each = {module: private_names(tree) for module, tree in trees.items()}
    anybodys = set().union(*of_each.values()) - TORCHS
    return [
        f"{module}:{node.lineno}: {ast.unparse(node)}"
        for module, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in anybodys - of_each[module]
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    ]


def test_no_module_uses_a_private_name_of_another():
    assert foreign_private_names({name: ast.parse(path.read_text()) for name, path in modules().items()}) == []


def test_a_private_name_of_another_module_is_found():
    owner, user = "class A:\n    def _run(self):\n        self._x = 1\n", "def f(a):\n    a._run()\n    a._modules\n"
    assert foreign_private_names({"owner": ast.parse(owner), "user": ast.parse(user)}) == ["user:2: a._run()"[:-2]]


@pytest.mark.parametrize(
    ("arrows", "found"),
    [
        ([("engine/plan.h", "wire/layout.h"), ("lanes/lane.h", "wire/layout.h")], []),
        ([("wire/layout.h", "engine/plan.h")], ["wire/layout.h → engine/plan.h: wire stands below engine"]),
    ],
)
def test_an_arrow_upward_is_found(arrows, found):
    assert upward(arrows, CSRC, lambda name: name.split("/")[0]) == found


def test_a_circle_is_found():
    assert circle([("a", "b"), ("b", "c"), ("c", "b"), ("c", "d")]) == ["b", "c", "b"]
    assert circle([("a", "b"), ("b", "c"), ("a", "c")]) == []


def test_every_package_is_installed():
    packages = (ROOT / "pyproject.toml").read_text().partition("\npackages = [")[2].partition("]")[0]
    listed = set(re.findall(r'^    "(fusedcomm[\w.]*)",$', packages, re.M))
    folders = [path.parent.relative_to(ROOT) for path in (ROOT / "fusedcomm").rglob("__init__.py")]
    found = {".".join(folder.parts) for folder in folders} | {"fusedcomm.kernels"}
    assert listed == found
