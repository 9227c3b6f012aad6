"""The budget of lines and words: nothing is over its limit, and what is over is found."""

import json

import budget
import pytest


def test_nothing_is_over_its_limit():
    assert not budget.passed()
    assert set(json.loads(budget.LIMITS.read_text())) == set(budget.COUNTED)


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A small project with its limits: tree({name of a limit: limit})."""
    texts = {"setup.py": "1\n", "csrc/a/b.cpp": "1\n2\n", "csrc/c.txt": "1\n", "README.md": "one two"}
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "fusedcomm").mkdir()
    (tmp_path / "fusedcomm" / "linked").symlink_to(tmp_path / "csrc")
    monkeypatch.setattr(budget, "ROOT", tmp_path)
    monkeypatch.setattr(budget, "LIMITS", tmp_path / "limits.json")
    return lambda limits: budget.LIMITS.write_text(json.dumps(limits))


def test_lines_and_words_are_counted_by_folder(tree, capsys):
    tree({"product": 3, "README": 2})
    assert budget.by_folder("product") == {"csrc/a": 2, "setup.py": 1} and not budget.passed()
    assert "3 of       3 lines, 0 left" in capsys.readouterr().out


def test_what_is_over_is_named_with_its_limit(tree):
    tree({"product": 2, "README": 1})
    product, words = budget.passed()
    assert product.startswith("product: 3 lines, and the limit is 2") and words.startswith("README: 2 words")
