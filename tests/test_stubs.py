"""fusedcomm/_C.pyi has the names and arguments of the built extension."""

import ast

import make_stubs

from fusedcomm.native import _C


def declared(text: str) -> dict[str, list[str]]:
    """The names of a stub's classes, functions and constants, and the arguments of each in order. Types do not count:
    they are spelled as the pybind11 of the installed torch spells them."""
    found: dict[str, list[str]] = {}

    def walk(body: list[ast.stmt], owner: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                found[owner + node.name] = [ast.unparse(base) for base in node.bases]
                walk(node.body, f"{owner}{node.name}.")
            elif isinstance(node, ast.FunctionDef):
                given = node.args
                arguments = [argument.arg for argument in (*given.posonlyargs, *given.args)]
                arguments += ["*", *(argument.arg for argument in given.kwonlyargs)] if given.kwonlyargs else []
                found.setdefault(owner + node.name, []).append(", ".join(arguments))
            elif isinstance(node, ast.AnnAssign):
                found[owner + ast.unparse(node.target)] = []

    walk(ast.parse(text).body, "")
    return found


def test_the_stub_declares_what_the_extension_has():
    stub, built = declared(make_stubs.FILE.read_text()), declared(make_stubs.rendered(_C))
    differing = sorted(name for name in stub.keys() | built.keys() if stub.get(name) != built.get(name))
    assert not differing, f"fusedcomm/_C.pyi differs from the built extension in {differing}: run `make stubs`"
    assert {"Codec.pack", "bucket_layout", "WIRES"} <= built.keys() and "lossy" in built["Codec.pack"][0]
