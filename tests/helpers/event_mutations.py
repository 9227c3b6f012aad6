"""Seeded faults, in tests/helpers/mutations/. One build of the product's C++ sources has all faults in the order of
streams; an environment variable chooses the one that a process has."""

import re
from dataclasses import dataclass
from pathlib import Path

from scripts import ROOT

MUTATIONS = Path(__file__).parent / "mutations"
CHOICE = "EVENT_MUTATION"
"""The environment variable: the index of the chosen mutation. Unset: none."""

HEADER = f"""#pragma once
#include <cstdlib>
namespace event_mutations {{
inline bool chosen(int index) {{
  static const char* const choice = std::getenv("{CHOICE}");
  static const int chosen_index = choice ? std::atoi(choice) : -1;
  return index == chosen_index;
}}
}}  // namespace event_mutations
"""


@dataclass(frozen=True)
class Mutation:
    """One record, wait, keep-alive or stream switch that is removed.

    where: the function and what it is, in words. file: below csrc/. text: occurs once in the file. «» in it mark what
    is replaced, otherwise all of it is: a statement, ending in a semicolon, or an expression. replacement: statements,
    or an expression of the same type. scene: of the native test, or the check of a kernel. message: what the scene
    prints when it fails, with … for any text and / between two of which it prints one; empty for kernels.
    """

    where: str
    file: str
    text: str
    replacement: str
    scene: str
    message: str

    def is_found_in(self, output: str) -> bool:
        patterns = (".*".join(map(re.escape, message.split(" … "))) for message in self.message.split(" / "))
        return any(re.search(pattern, output) for pattern in patterns)


def read(name: str) -> list[Mutation]:
    """The mutations of a file in tests/helpers/mutations/.

    The file has a line [source] for each source and, for each mutation in it, a line that says where it is, a line with
    "= ", the scene and after a colon its message, a line with "- " and the text, and unless it is empty a line with
    "+ " and the replacement. ⏎ stands for the end of a line.
    """
    mutations, file = [], ""
    for block in re.split(r"\n(?![-+=] )", (MUTATIONS / f"{name}.txt").read_text().rstrip("\n")):
        head, *edit = block.replace("⏎", "\n").split("\n- ", 1)
        if not edit:
            file = head.strip("[]")
            continue
        where, _, found = head.partition("\n= ")
        scene, _, message = found.partition(": ")
        text, _, replacement = edit[0].partition("\n+ ")
        mutations.append(Mutation(where, file, text, replacement, scene, message))
    return mutations


def write_sources(mutations: list[Mutation], folder: Path) -> None:
    """Writes the mutated sources to folder / "csrc", and the header that they need to be compiled with."""
    edits: dict[str, dict[tuple[int, int], str]] = {}  # by file and span; several may be of the same text
    for index, mutation in enumerate(mutations):
        before, _, rest = mutation.text.partition("«")
        part, mark, after = rest.partition("»")
        if not mark:
            before, part, after = "", mutation.text, ""
        source = (ROOT / "csrc" / mutation.file).read_text()
        count = source.count(before + part + after)
        assert count == 1, f"{mutation.file} has this text {count} times, not once: {mutation.text}"
        chosen = f"event_mutations::chosen({index})"
        begin = source.index(before + part + after) + len(before)
        span = begin, begin + len(part)
        otherwise = edits.setdefault(mutation.file, {}).get(span, part)
        if part.endswith(";"):
            new = f"if ({chosen}) {{ {mutation.replacement} }} else {{ {otherwise} }}"
        else:
            new = f"({chosen} ? ({mutation.replacement}) : ({otherwise}))"
        edits[mutation.file][span] = new
    for file, of_file in edits.items():
        source = (ROOT / "csrc" / file).read_text()
        for (begin, end), new in sorted(of_file.items(), reverse=True):
            source = source[:begin] + new + source[end:]
        path = folder / "csrc" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    (folder / "event_mutations.h").write_text(HEADER)


def compile_flags(folder: Path) -> list[str]:
    """For the sources that write_sources() has written to `folder`. They include each other before the originals."""
    return ["-include", str(folder / "event_mutations.h"), "-I", str(folder / "csrc")]
