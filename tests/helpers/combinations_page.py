"""Writes docs/combinations.md, which shows the table of fusedcomm/config/combinations.py.

python tests/helpers/combinations_page.py
"""

import itertools

from pages import DOCS

from fusedcomm.config.combinations import GIVEN, TABLE, Besides, Combination

PAGE = DOCS / "combinations.md"
HEAD = """# What does not go together

Each line has arguments that exclude each other, or one that its front end does not take. Errors say why, and what to
use instead. Generated from fusedcomm/config/combinations.py.
"""


def page() -> str:
    """The page's text."""
    groups = itertools.groupby(TABLE, key=lambda row: row.front_end)
    return HEAD + "".join(f"\n**{name}**\n\n```text\n{''.join(map(line, rows))}```\n" for name, rows in groups)


def line(row: Combination) -> str:
    """The row's settings: arguments as they are written, and facts."""
    return ", ".join(setting(name, values) for name, values in row.settings.items()) + "\n"


def setting(name: str, values: object) -> str:
    if not name.isidentifier():
        return name
    if values is GIVEN:
        return f"{name}=…"
    sign = "≠" if isinstance(values, Besides) else "="
    return name + sign + "|".join(map(repr, values if isinstance(values, tuple) else (values,))).replace("'", '"')


if __name__ == "__main__":
    PAGE.write_text(page())
