"""The blocks of code of README.md and docs/."""

import dataclasses
import re
import textwrap
from pathlib import Path

from scripts import ROOT

README, DOCS = ROOT / "README.md", ROOT / "docs"
PAGES = [README, *sorted(DOCS.rglob("*.md"))]
FENCED = re.compile(r"(?ms)^( *)```(\w*)\n(.*?)^\1```$")


@dataclasses.dataclass(frozen=True)
class Block:
    """`before`: the paragraph above it."""

    page: str
    language: str
    code: str
    before: str = ""

    @property
    def commands(self) -> list[str]:
        """The lines of a block of commands, each of which a backslash may continue; without comments."""
        lines = (line.strip() for line in self.code.replace("\\\n", " ").splitlines())
        return [line for line in lines if line and line[0] != "#"]


def blocks(*pages: Path) -> list[Block]:
    """Those of some pages, without an argument of all."""
    found = []
    for page in pages or PAGES:
        text, end = page.read_text(), 0
        for block in FENCED.finditer(text):
            before, end = text[end : block.start()].rstrip().rpartition("\n\n")[2], block.end()
            found.append(Block(str(page.relative_to(ROOT)), block[2], textwrap.dedent(block[3]), before))
    return found
