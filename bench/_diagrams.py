"""Draws the diagrams in docs/pictures/: how a bucket goes through a step, and the three sums of codes.

python bench/_diagrams.py
"""

from pathlib import Path

from _pictures import BLUE, FOLDER, GREEN, GREY, ORANGE, PURPLE

from fusedcomm.tools.output import pyplot

PARTS = (BLUE, GREEN, ORANGE, PURPLE)
BAR = 0.16
"""The height of a bar that stands for a bucket or a part of one."""
SETTINGS = {"svg.hashsalt": "fusedcomm", "svg.fonttype": "path", "font.size": 10}
"""With these the same drawing is the same file, and shows the same letters on every machine."""


def bucket(path: Path) -> None:
    """One bucket on one rank, from the backward pass to the optimizer."""
    stages = [
        ("backward pass\nfills a bucket", GREY),
        ("pack\n16, 8 or 4 bits", BLUE),
        ("wire\nto the other ranks", ORANGE),
        ("reduce\nsum in fp32", BLUE),
        ("wire\nto all ranks", ORANGE),
        ("unpack\nthe mean in fp32", BLUE),
    ]
    figure, axes = _canvas(10.5, 2.6, 6 * 1.75, 2.6)
    for index, (text, color) in enumerate(stages):
        x = 0.05 + index * 1.75
        _box(axes, x, 1.5, 1.5, 0.8, text, color)
        if index:
            _arrow(axes, (x - 0.25, 1.9), (x, 1.9))
    _box(axes, 1.8, 0.75, 6.4, 0.45, "the backward pass goes on: next buckets", GREY)
    _box(axes, 8.35, 0.75, 1.95, 0.45, "last bucket: exposed", "white")
    axes.text(0.05, 0.3, "Between two ranks unpack does the sum. Exposed: what a step waits for after its last bucket.")
    _save(figure, path)


def one_shot(path: Path) -> None:
    figure, axes = _canvas(5, 3.3, 5, 3.3)
    for rank in range(2):
        x = 1.4 + rank * 1.8
        axes.text(x + 0.7, 3.05, f"rank {rank}", ha="center")
        _bar(axes, x, 2.6, [PARTS[rank]] * 4)
        for of in range(2):
            _bar(axes, x, 1.65 - of * 0.24, [PARTS[of]] * 4)
            _arrow(axes, (1.4 + of * 1.8 + 0.7, 2.55), (x + 0.7, 1.9), PARTS[of])
        _bar(axes, x, 0.6, [GREY] * 4)
        _arrow(axes, (x + 0.7, 1.35), (x + 0.7, 0.82))
    _captions(axes, [(2.6, "pack"), (1.55, "all codes\nto all ranks"), (0.6, "sum in fp32:\nthe mean")])
    _save(figure, path)


def two_shot(path: Path) -> None:
    num_ranks = 4
    figure, axes = _canvas(8.6, 4, 8.6, 4)
    for rank in range(num_ranks):
        x = 1.4 + rank * 1.8
        axes.text(x + 0.7, 3.75, f"rank {rank}", ha="center")
        _bar(axes, x, 3.3, PARTS)
        for of in range(num_ranks):
            _bar(axes, x + 0.52, 2.45 - of * 0.2, [PARTS[rank]])
        _bar(axes, x + 0.52, 1.35, [PARTS[rank]])
        _arrow(axes, (x + 0.7, 1.82), (x + 0.7, 1.55))
        _bar(axes, x, 0.45, PARTS)
        if rank != 1:
            _arrow(axes, (1.4 + 1.8 + 0.7, 1.32), (x + 0.525, 0.66), PARTS[1])
        _arrow(axes, (x + 0.525, 3.28), (1.4 + 1.8 + 0.7, 2.65), PARTS[1])
    _captions(
        axes,
        [
            (3.3, "pack"),
            (2.2, "part r of all\nto rank r"),
            (1.35, "sum in fp32,\nencode"),
            (0.45, "each part\nto all ranks"),
        ],
    )
    axes.text(1.4, 0.05, "The arrows are those of part 1, which rank 1 sums.", fontsize=9)
    _save(figure, path)


def by_host(path: Path) -> None:
    figure, axes = _canvas(8.6, 4.4, 8.6, 4.4)
    for rank in range(4):
        host, place = divmod(rank, 2)
        x = 1.4 + rank * 1.8 + host * 0.1
        middle, neighbor = x + 0.7, x + 0.7 + (1.8 if place == 0 else -1.8)
        axes.text(middle, 3.85, f"rank {rank}", ha="center")
        _bar(axes, x, 3.4, [PARTS[0]] * 2 + [PARTS[2]] * 2)
        color = PARTS[0] if place == 0 else PARTS[2]
        _bar(axes, x + 0.35, 2.45, [color] * 2)
        _arrow(axes, (middle, 3.38), (middle, 2.65), color)
        _arrow(axes, (neighbor, 3.38), (middle + (0.1 if place == 0 else -0.1), 2.65), color)
        _bar(axes, x + 0.35, 1.5, [color] * 2)
        other_x = middle + (3.7 if host == 0 else -3.7)
        _arrow(axes, (other_x, 2.43), (middle, 1.7), color)
        _arrow(axes, (middle, 2.43), (middle, 1.7), color)
        _bar(axes, x, 0.5, [PARTS[0]] * 2 + [PARTS[2]] * 2)
        _arrow(axes, (middle, 1.48), (middle, 0.72), color)
        _arrow(axes, (middle, 1.48), (neighbor, 0.72), color)
    for host in range(2):
        x = 1.3 + host * 3.7
        axes.add_patch(pyplot().Rectangle((x, 0.3), 3.4, 3.9, fill=False, edgecolor=GREY, linestyle="--"))
        axes.text(x + 1.7, 4.24, f"host {host}", ha="center", fontsize=9)
    _captions(
        axes,
        [
            (3.4, "gradients"),
            (2.45, "sums within\nthe host, bf16"),
            (1.5, "sums between\nhosts, wire"),
            (0.5, "means within\nthe host"),
        ],
    )
    _save(figure, path)


def _canvas(width_inches: float, height_inches: float, width: float, height: float):
    figure, axes = pyplot().subplots(figsize=(width_inches, height_inches))
    figure.subplots_adjust(0, 0, 1, 1)
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return figure, axes


def _box(axes, x: float, y: float, width: float, height: float, text: str, color: str) -> None:
    face = color if color == "white" else f"{color}40"
    axes.add_patch(pyplot().Rectangle((x, y), width, height, facecolor=face, edgecolor="black", linewidth=0.8))
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center")


def _bar(axes, x: float, y: float, colors) -> None:
    for index, color in enumerate(colors):
        axes.add_patch(pyplot().Rectangle((x + index * 0.35, y), 0.35, BAR, facecolor=color, edgecolor="white"))


def _arrow(axes, begin: tuple[float, float], end: tuple[float, float], color: str = "black") -> None:
    axes.annotate("", xy=end, xytext=begin, arrowprops={"arrowstyle": "-|>", "color": color, "lw": 1.2})


def _captions(axes, captions: list[tuple[float, str]]) -> None:
    for y, text in captions:
        axes.text(0.05, y + BAR / 2, text, va="center", fontsize=9)


def _save(figure, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, facecolor="white")
    pyplot().close(figure)


def main(folder: Path = FOLDER, suffix: str = ".svg") -> None:
    with pyplot().rc_context(SETTINGS):
        for draw in (bucket, one_shot, two_shot, by_host):
            draw(folder / f"{draw.__name__.replace('_', '-')}{suffix}")


if __name__ == "__main__":
    main()
