"""fusedcomm/_C.pyi, which the build writes, tells type checkers what the extension has."""

import ast
import importlib.util
from pathlib import Path

from fusedcomm.native import _C

ROOT = Path(__file__).resolve().parents[1]


def arguments_of(body: list[ast.stmt], name: str) -> list[str]:
    """The arguments of the first function of this name."""
    (found, *_) = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == name]
    return [argument.arg for argument in found.args.args]


def test_the_build_has_written_a_stub_of_the_extension_beside_it():
    spec = importlib.util.spec_from_file_location("stubs", ROOT / "csrc" / "bindings" / "stubs.py")
    stubs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stubs)
    text = Path(_C.__file__).with_name("_C.pyi").read_text()
    assert text == stubs.rendered(_C)
    body = ast.parse(text).body
    classes = {node.name: node for node in body if isinstance(node, ast.ClassDef)}
    assert arguments_of(classes["Codec"].body, "pack")[:4] == ["self", "layout", "chunk", "lossy"]
    assert "max_chunk_nbytes" in arguments_of(body, "bucket_layout")
    assert [ast.unparse(node.target) for node in body if isinstance(node, ast.AnnAssign)].count("WIRES") == 1
