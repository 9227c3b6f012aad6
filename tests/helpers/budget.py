"""Prints how much of the budget of lines and words is used, by folder. Fails if a limit of budget.json is passed.

A limit falls whenever something is removed. It rises only with a change that brings a capability, and says so.

    python tests/helpers/budget.py
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMITS = Path(__file__).with_name("budget.json")
CODE = (".py", ".cpp", ".h", ".cu")
COUNTED: dict[str, tuple[tuple[str, ...], tuple[str, ...], str]] = {
    "product": (("csrc", "fusedcomm", "kernels", "setup.py"), CODE, "lines"),
    "tests": (("tests",), CODE, "lines"),
    "bench": (("bench",), CODE, "lines"),
    "docs": (("docs",), (".md",), "words"),
    "README": (("README.md",), (".md",), "words"),
    "CHANGELOG": (("CHANGELOG.md",), (".md",), "lines"),
}
"""By name of a limit: what is counted, the files' endings, and whether lines or words."""


def files(path: Path, endings: tuple[str, ...]) -> Iterator[Path]:
    """The files at `path` with one of these endings. Links are not followed: an editable install makes some."""
    if path.is_file():
        yield path
    for folder, _, names in os.walk(path):
        yield from (Path(folder, name) for name in names if name.endswith(endings))


def count(path: Path, unit: str) -> int:
    """As wc -l or wc -w."""
    text = path.read_text(encoding="utf-8")
    return text.count("\n") if unit == "lines" else len(text.split())


def by_folder(name: str) -> dict[str, int]:
    """{folder below one of what is counted, or file: its lines or words}, the largest first."""
    tops, endings, unit = COUNTED[name]
    found: dict[str, int] = {}
    for top in tops:
        for path in files(ROOT / top, endings):
            inside = path.relative_to(ROOT).parts
            place = "/".join(inside[:2]) if len(inside) > 2 else inside[0]
            found[place] = found.get(place, 0) + count(path, unit)
    return dict(sorted(found.items(), key=lambda entry: -entry[1]))


def passed() -> list[str]:
    """Prints the table. Returns what is over its limit."""
    limits, over = json.loads(LIMITS.read_text()), []
    for name, limit in limits.items():
        folders, unit = by_folder(name), COUNTED[name][2]
        total = sum(folders.values())
        print(f"{name:30} {total:7,} of {limit:7,} {unit}, {limit - total:,} left")
        if len(folders) > 1:
            for place, number in folders.items():
                print(f"    {place:26} {number:7,}")
        if total > limit:
            over.append(f"{name}: {total:,} {unit}, and the limit is {limit:,}: take something out ({LIMITS.name})")
    return over


if __name__ == "__main__":
    sys.exit("\n".join(passed()) or None)
