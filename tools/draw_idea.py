"""docs/images/one-idea.svg, for the README: the same updates in 40 random coordinates, by two methods.

    python tools/draw_idea.py            write it
    python tools/draw_idea.py --check    exit code 1 where the file says something else

Four clients of ranks 2, 4, 8 and 8 send updates of one matrix (60 x 44, float64, of fixed seeds): a direction that they
share and one of their own each. 40 times every upload (B, A) is sent as (B Q, Q^-1 A), with a random Q of condition 10:
the same update in other coordinates. A point is what the server then has, seen in a plane: across, its share of the
true mean M; upwards, the direction at right angles to M in which the means of factors spread most. In units of ||M||.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fedlora import Adapter, Client, LoRA, Server, Upload, build
from fedlora.analysis.audit import regauge

FILE = Path(__file__).parent.parent / "docs" / "images" / "one-idea.svg"
TIMES, CONDITION, RANKS, SHAPE = 40, 10.0, (2, 4, 8, 8), (60, 44)
WIDTH, HEIGHT, SIDE, TOP = 800, 500, 330, 90
COLOURS = {"padded-average": "#D55E00", "glora": "#0072B2"}
TITLES = {"padded-average": "Mean of factors", "glora": "GLoRA"}


@dataclass(frozen=True)
class Idea:
    """points: method -> (TIMES, 2), as drawn. off: method -> the median distance to the true mean, in its norms."""

    points: dict[str, Tensor]
    off: dict[str, float]


def uploads() -> list[Upload]:
    """What the four clients send."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    column, row = normal(SHAPE[0], 1), normal(1, SHAPE[1])
    sent = []
    for k, rank in enumerate(RANKS):
        B = torch.cat([2 * column, normal(SHAPE[0], rank - 1)], dim=1)
        A = torch.cat([2 * row, normal(rank - 1, SHAPE[1])])
        sent.append(Upload(Client(f"site-{k}", rank), 100, Adapter({"q": LoRA(B, A)})))
    return sent


def result(method: str, sent: Sequence[Upload]) -> Tensor:
    """The server's update after a round of these uploads."""
    server = Server(build(method))
    seed = Adapter({"q": LoRA(torch.zeros(SHAPE[0], max(RANKS)).double(), torch.ones(max(RANKS), SHAPE[1]).double())})
    update = server.global_update(server.aggregate(server.init(seed), sent))["q"]
    return update.B @ update.A


def measure() -> Idea:
    """Both methods, on the same uploads in the same coordinates."""
    sent = uploads()
    mean = torch.stack([u.adapter.modules["q"].B @ u.adapter.modules["q"].A for u in sent]).mean(0).flatten()
    found = {
        method: torch.stack(
            [result(method, [regauge(u, CONDITION, seed=k) for u in sent]).flatten() for k in range(TIMES)]
        )
        / mean.norm()
        for method in TITLES
    }
    across = mean / mean.norm()
    rest = found["padded-average"] - (found["padded-average"] @ across)[:, None] * across
    upwards = torch.linalg.svd(rest - rest.mean(0), full_matrices=False).Vh[0]
    upwards = upwards * upwards[upwards.abs().argmax()].sign()
    plane = torch.stack([across, upwards], dim=1)
    off = {method: float((D - across).norm(dim=1).median()) for method, D in found.items()}
    return Idea({method: D @ plane for method, D in found.items()}, off)


def drawing(idea: Idea) -> str:
    """The picture as SVG: a panel for each method, with the true mean as a cross."""
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" font-family="sans-serif">',
        "<title>The same updates in 40 random coordinates: the mean of factors moves, GLoRA does not</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    said = {
        "padded-average": f"off by {idea.off['padded-average']:.0%} of the mean",
        "glora": "one point, 40 times" if idea.off["glora"] < 1e-12 else f"off by {idea.off['glora']:.0e}",
    }
    for k, (method, title) in enumerate(TITLES.items()):
        left = 45 + k * (SIDE + 50)
        middle = left + SIDE / 2
        out += [
            f'<text x="{middle:g}" y="38" text-anchor="middle" font-size="32" font-weight="bold">{title}</text>',
            f'<text x="{middle:g}" y="74" text-anchor="middle" font-size="26" '
            f'fill="{COLOURS[method]}">{said[method]}</text>',
            f'<rect x="{left}" y="{TOP}" width="{SIDE}" height="{SIDE}" fill="#F4F7FA" stroke="#333"/>',
        ]
        x, y = _at(left, 1.0, 0.0)
        out.append(f'<path d="M{x - 22} {y}h44M{x} {y - 22}v44" stroke="#000" stroke-width="3"/>')
        out += [
            '<circle cx="{}" cy="{}" r="8" fill="{}" fill-opacity="0.55"/>'.format(*_at(left, a, b), COLOURS[method])
            for a, b in idea.points[method].tolist()
        ]
    below = "+ the true mean of four updates. Dots: what the server"
    last = "makes of them, sent in 40 random coordinates"
    out += [
        f'<text x="{WIDTH / 2:g}" y="{TOP + SIDE + 36}" text-anchor="middle" font-size="26">{below}</text>',
        f'<text x="{WIDTH / 2:g}" y="{TOP + SIDE + 68}" text-anchor="middle" font-size="26">{last}</text>',
        "</svg>",
    ]
    return "\n".join(out) + "\n"


def _at(left: int, across: float, upwards: float) -> tuple[int, int]:
    """Pixels of a point: -0.35 to 1.35 across, -0.85 to 0.85 upwards."""
    return round(left + SIDE * (across + 0.35) / 1.7), round(TOP + SIDE / 2 - SIDE * upwards / 1.7)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    idea = measure()
    print("  ".join(f"{method}: off by {off:.2g}" for method, off in idea.off.items()))
    if parser.parse_args().check:
        return 0 if FILE.is_file() and FILE.read_text(encoding="utf-8") == drawing(idea) else 1
    FILE.write_text(drawing(idea), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
