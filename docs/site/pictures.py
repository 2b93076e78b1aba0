"""Draws the pictures of docs/concepts.md: `PYTHONPATH=src python docs/site/pictures.py`.

They are narrow, so that their text is legible on a phone, and have their own background in light and dark.
`benchmarks.picture` draws figures with the same class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

IMAGES = Path(__file__).parents[1] / "images"
WIDTH = 440

COLORS = {
    "parameters": ("#4c78a8", "#6fa0d8"),
    "gradients": ("#d1495b", "#ef7f8b"),
    "optimizer state": ("#8a6bb1", "#b39bd6"),
    "all-gathers": ("#f2a541", "#f5b85f"),
    "reductions": ("#3c9d7c", "#5fc3a0"),
    "activations": ("#a3a86b", "#c3c98a"),
    "other": ("#a9a9a9", "#7d7d7d"),
}
"""Colors in light and dark. The names are the kinds of memory of `unshard.tools.plan`."""

STYLE = """
  text { font: 15px system-ui, "Segoe UI", "Noto Sans", "DejaVu Sans", sans-serif; fill: #1f2328 }
  .small { font-size: 13px } .bold { font-weight: 600 } .right { text-anchor: end } .middle { text-anchor: middle }
  .on { fill: #ffffff } .dark-on { fill: #1f2328 }
  .panel { fill: #ffffff } .empty { fill: #eceff3 } .line { stroke: #8b949e; stroke-width: 1.5; fill: none }
  .grid { stroke: #8b949e; stroke-width: 1; stroke-opacity: 0.4; fill: none } .tip { fill: #8b949e }
"""
DARK = """
    text { fill: #e6edf3 } .on, .dark-on { fill: #10151c }
    .panel { fill: #1c2128 } .empty { fill: #343b45 }
"""


class Picture:
    def __init__(self, title: str, width: float = WIDTH, colors: dict[str, tuple[str, str]] = COLORS):
        self.title, self.width, self.colors = title, width, colors
        self.height, self.parts = 0.0, list[str]()

    def box(self, x: float, y: float, width: float, height: float, kind: str, radius: float = 2) -> None:
        place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{radius}"'
        self.parts.append(f'<rect class="{kind.replace(" ", "-")}" {place}/>')
        self.height = max(self.height, y + height)

    def text(self, x: float, y: float, text: str, style: str = "") -> None:
        escaped = text.replace("&", "&amp;").replace("<", "&lt;")
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" class="{style}">{escaped}</text>')
        self.height = max(self.height, y + 4)

    def line(self, *points: tuple[float, float], style: str = "line") -> None:
        self.parts.append(f'<polyline class="{style}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>')

    def arrow(self, x: float, top: float, bottom: float) -> None:
        """Draw a vertical arrow to `bottom`, which may be above `top`."""
        back = 7 if bottom > top else -7
        self.line((x, top), (x, bottom - back))
        tip = f"{x:.1f},{bottom:.1f} {x - 4.5:.1f},{bottom - back:.1f} {x + 4.5:.1f},{bottom - back:.1f}"
        self.parts.append(f'<polygon class="tip" points="{tip}"/>')

    def curve(self, points: Iterable[tuple[float, float]], kind: str, width: float, opacity: float = 1) -> None:
        """Draw a line in the color of `kind`."""
        along = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        style = f'fill="none" stroke-width="{width}" stroke-opacity="{opacity}" stroke-linejoin="round"'
        self.parts.append(f'<polyline class="stroke-{kind.replace(" ", "-")}" {style} points="{along}"/>')

    def rules(self, shade: int) -> str:
        """CSS of the colors in light (0) or dark (1)."""
        found, indent = [], "  " + "  " * shade
        curves = any('class="stroke-' in part for part in self.parts)
        for name, each in self.colors.items():
            found.append(f"{indent}.{name.replace(' ', '-')} {{ fill: {each[shade]} }}\n")
            if curves:
                found.append(f"{indent}.stroke-{name.replace(' ', '-')} {{ stroke: {each[shade]} }}\n")
        return "".join(found)

    def svg(self) -> str:
        height, width = self.height + 14, f"{self.width:.0f}"
        dark = f"{DARK}{self.rules(1)}"
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:.0f}" width="{width}" '
                f'height="{height:.0f}" role="img">',
                f"<title>{self.title}</title>",
                f"<style>{STYLE}{self.rules(0)}  @media (prefers-color-scheme: dark) {{{dark}  }}\n</style>",
                f'<rect class="panel" width="{width}" height="{height:.0f}" rx="8"/>',
                *self.parts,
                "</svg>\n",
            ]
        )


# -- the path of a parameter -------------------------------------------------------------------------------------------

ROWS: list[tuple[str, str, str, bool, str]] = [
    # stage, what each rank holds, kind, unsharded, how it comes to the next stage
    ("at rest", "shard, fp32", "parameters", False, "all-gather in bf16"),
    ("forward", "unsharded parameter, bf16", "all-gathers", True, "reshard: memory is freed"),
    ("between", "shard, fp32", "parameters", False, "all-gather again"),
    ("backward", "unsharded parameter, bf16", "all-gathers", True, "autograd"),
    ("", "unsharded gradient, bf16", "gradients", True, "reduce-scatter: mean in fp32"),
    ("", "sharded gradient, fp32", "gradients", False, "optimizer.step()"),
    ("at rest", "updated shard, fp32", "parameters", False, ""),
]


def parameter() -> Picture:
    """What two ranks hold of one parameter, from one step to the next."""
    picture = Picture("What two ranks hold of one parameter during a step")
    lanes, size, row = (222.0, 332.0), 92.0, 74.0
    for rank, left in enumerate(lanes):
        picture.text(left + size / 2, 26, f"rank {rank}", "bold middle")
    for number, (stage, what, kind, unsharded, how) in enumerate(ROWS):
        top = 42 + row * number
        picture.text(16, top + 14, stage or what, "bold" if stage else "small")
        if stage:
            picture.text(16, top + 32, what, "small")
        for rank, left in enumerate(lanes):
            for half in range(2):
                owned = unsharded or half == rank
                picture.box(left + half * size / 2, top, size / 2 - 2, 30, kind if owned else "empty")
            if how:
                picture.arrow(left + size / 2 - 1, top + 34, top + row - 5)
        if how:
            picture.text(212, top + 57, how, "small right")
    return picture


# -- memory over a step ----------------------------------------------------------------------------------------------


def memory() -> Picture:
    """A real plan: six transformer blocks on four ranks."""
    planned = plan_of(4)
    alone = plan_of(1).peak
    points = [each for each in planned.to_dict()["timeline"] if each["at"] != "forward (root)"]
    kinds = [kind for kind in COLORS if any(point.get(kind) for point in points)]
    picture = Picture("Memory of one of four ranks over a training step")
    left, top, bottom = 50.0, 20.0, 280.0
    most = 100 * -(-planned.peak // (100 * 2**20))
    scale = (bottom - top) / most
    for number in range(0, most + 1, 100):
        y = bottom - number * scale
        picture.line((left, y), (WIDTH - 12, y), style="grid")
        picture.text(left - 6, y + 5, str(number), "small right")
    wide = (WIDTH - 12 - left) / len(points)
    for number, point in enumerate(points):
        y, x = bottom, left + number * wide
        for kind in kinds:
            height = point.get(kind, 0) / 2**20 * scale
            y -= height
            if height > 0.2:
                picture.box(x + 1, y, wide - 2, height, kind, 0)
    for name, title in (("forward", "forward"), ("backward", "backward"), ("optimizer", "step")):
        found = [number for number, point in enumerate(points) if point["at"].startswith(name)]
        first, last = left + found[0] * wide, left + (found[-1] + 1) * wide
        picture.line((first + 2, bottom + 8), (last - 2, bottom + 8))
        picture.text((first + last) / 2, bottom + 26, title, "small middle")
    for number, kind in enumerate(kinds):
        x, y = 16 + 140 * (number % 3), bottom + 52 + 24 * (number // 3)
        picture.box(x, y - 11, 12, 12, kind)
        picture.text(x + 18, y, kind, "small")
    y = bottom + 52 + 24 * -(-len(kinds) // 3) + 2
    peak = planned.peak / 2**20
    picture.text(16, y, f"MiB on one of 4 ranks; peak {peak:.0f} MiB, in {planned.peak_at}.", "small")
    picture.text(16, y + 20, f"On one rank, the same step needs {alone / 2**20:.0f} MiB.", "small")
    return picture


def plan_of(world: int) -> Any:
    import torch
    from torch import nn

    from unshard import MixedPrecisionPolicy
    from unshard.tools import plan
    from unshard.tools.program import Program, tokens

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(8000, 1024), nn.Linear(1024, 8000, bias=False)
            self.blocks = nn.ModuleList(
                nn.TransformerEncoderLayer(1024, 16, 4096, 0.0, batch_first=True) for _ in range(6)
            )

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            x = self.table(inputs)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch)[:, :-1].flatten(0, 1), batch[:, 1:].flatten())

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return plan(Program(Model, loss=loss, batch=tokens("2x512")), world=world, policy=policy, advise=False)


# -- streams ---------------------------------------------------------------------------------------------------------


def streams() -> Picture:
    """Four blocks: all-gathers run one unit ahead, and reductions one unit behind."""
    picture = Picture("Streams of a GPU in forward and backward of four units")
    left, wide = 16.0, 68.0
    up, down = [f"block {number}" for number in range(4)], [f"block {number}" for number in reversed(range(4))]
    rows: list[tuple[str, list[tuple[str, list[str], int]]]] = [
        ("Forward", [("all-gathers", up, 0), ("compute", [*up, "loss"], 1)]),
        ("Backward", [("all-gathers", down, 0), ("compute", ["loss", *down], 0), ("reduce-scatters", down, 2)]),
    ]
    kinds = {"all-gathers": "all-gathers", "compute": "parameters", "reduce-scatters": "reductions"}
    top = 16.0
    for title, lanes in rows:
        picture.text(left, top + 14, title, "bold")
        top += 28
        for lane, units, start in lanes:
            picture.text(left, top + 12, lane, "small")
            top += 19
            picture.box(left, top, WIDTH - 2 * left, 28, "empty")
            for number, unit in enumerate(units):
                x = left + 2 + (start + number) * wide
                picture.box(x, top + 2, wide - 4, 24, kinds[lane])
                style = "small middle " + ("on" if lane == "compute" else "dark-on")
                picture.text(x + wide / 2 - 2, top + 19, unit, style)
            top += 36
        top += 12
    picture.line((left, top), (WIDTH - left, top))
    picture.text(WIDTH - left, top + 18, "time \N{RIGHTWARDS ARROW}", "small right")
    return picture


# -- meshes ----------------------------------------------------------------------------------------------------------

Owned = Callable[[int, int, int], bool]

MESHES: list[tuple[str, str, Owned]] = [
    ("Plain", "shards over all ranks: a quarter on each rank", lambda rank, row, _: row == rank),
    ("Hybrid", "2 replicas x 2 shards: a half on each rank", lambda rank, row, _: row // 2 == rank % 2),
    (
        "With tensor parallelism",
        "dp 2 x tp 2, RowwiseParallel: rows over dp, columns over tp",
        lambda rank, row, column: row // 2 == rank // 2 and column // 2 == rank % 2,
    ),
]


def meshes() -> Picture:
    """The elements of one weight that each of four ranks holds between two steps."""
    picture = Picture("The elements of one weight on each of four ranks, for three meshes")
    top, cell, step = 10.0, 18.0, 102.0
    groups = {
        "Hybrid": ("replica 0", "replica 1"),
        "With tensor parallelism": ("dp 0", "dp 1"),
    }
    for title, what, owned in MESHES:
        picture.text(16, top + 16, title, "bold")
        picture.text(16, top + 36, what, "small")
        top += 48
        for number, group in enumerate(groups.get(title, ())):
            picture.text(20 + number * 2 * step + step, top + 10, group, "small middle")
            picture.line((20 + number * 2 * step, top + 16), (20 + number * 2 * step + 2 * step - 20, top + 16))
        top += 24 if title in groups else 0
        for rank in range(4):
            left = 30 + rank * step
            for row in range(4):
                for column in range(4):
                    kind = "parameters" if owned(rank, row, column) else "empty"
                    picture.box(left + column * cell, top + row * cell, cell - 1.5, cell - 1.5, kind, 1)
            picture.text(left + 2 * cell, top + 4 * cell + 16, f"rank {rank}", "small middle")
        top += 4 * cell + 34
    return picture


PICTURES = {"parameter": parameter, "memory": memory, "streams": streams, "meshes": meshes}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (IMAGES / f"{name}.svg").write_text(draw().svg())
