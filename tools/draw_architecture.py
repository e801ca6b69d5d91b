"""docs/images/architecture.svg, from the imports of the code: which package uses which.

    python tools/draw_architecture.py            write it
    python tools/draw_architecture.py --check    exit code 1 where the file says something else

Rows are the layers that `lint-imports` checks (pyproject.toml). An arrow is an import, of any module of a package by
any module of another. One that follows from others is left out: runs uses core, and reaches it through simulation too.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

import grimp

ROOT = Path(__file__).parent.parent
FILE = ROOT / "docs" / "images" / "architecture.svg"
# What each does, in the words that fit into a box; one that lacks here is an error.
SAID = {
    "cli": "the commands", "flower": "machines, over TLS", "experiments": "grids of runs",
    "runs": "one file, one folder",
    "testing": "the contracts", "training": "a client's work",
    "simulation": "the engine", "hf": "a script's trainer",
    "analysis": "audits", "workers": "processes", "server": "one round", "methods": "one paper a file",
    "adapters": "PEFT files", "export": "adapter into base", "client": "a client's round",
    "attacks": "byzantine clients",
    "privacy": "noise and ledger",
    "core": "what travels", "linalg": "thin matrices", "data": "text, dealt out", "seeds": "random streams",
    "errors": "errors that teach", "doing": "what is under way", "given_files": "what people name",
    "versions": "what is installed",
}  # fmt: skip
Edges = Mapping[str, frozenset[str]]

WIDTH, WIDE, HIGH, ROW, WIDEST_GAP = 1180, 208, 70, 126, 90
COLOURS = ("#0072B2", "#D55E00", "#00795A", "#A8488A", "#8A6100", "#2B7FB8", "#444444")


def layers() -> list[list[str]]:
    """The rows of the import rule, the topmost first; the last three are drawn as one."""
    (rule, *_) = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    rows = [[name.strip() for name in row.split("|")] for row in rule["layers"]]
    return [*rows[:-3], [name for row in rows[-3:] for name in row]]


def imports(packages: Sequence[str]) -> Edges:
    """Package -> the other packages that it imports, by the code."""
    graph = grimp.build_graph("fedlora", cache_dir=None)
    found: dict[str, set[str]] = {name: set() for name in packages}
    for module in graph.modules:
        for other in graph.find_modules_directly_imported_by(module):
            a, b = ([*name.split("."), ""][1] for name in (module, other))
            if a != b and a in found and b in found:
                found[a].add(b)
    return {name: frozenset(others) for name, others in found.items()}


def reduced(edges: Edges) -> list[tuple[str, str]]:
    """The imports that follow from no others: with these alone the same can be reached."""

    def reaches(a: str, b: str) -> bool:
        return b in edges[a] or any(reaches(c, b) for c in edges[a])

    return [(a, b) for a in edges for b in sorted(edges[a]) if not any(reaches(c, b) for c in edges[a] if c != b)]


def drawing() -> str:
    """The picture as SVG."""
    rows = layers()
    places = _places(rows)
    homeless = {path.parent.name for path in (ROOT / "src" / "fedlora").glob("*/__init__.py")} - set(places)
    if homeless:
        raise SystemExit(f"in no row of the import rule (pyproject.toml, tool.importlinter): {sorted(homeless)}.")
    lacking = set(places) ^ set(SAID)
    if lacking:
        raise SystemExit(f"SAID in {Path(__file__).name} has too much or too little: {sorted(lacking)}.")
    arrows = reduced(imports(list(places)))
    height = ROW * len(rows) + 30
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" font-family="sans-serif">',
        "<title>The packages of fedlora and what they import, from the code</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        *(
            f'<marker id="head{k}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            f'orient="auto">'
            f'<path d="M0 0L10 5L0 10z" fill="{colour}"/></marker>'
            for k, colour in enumerate(COLOURS)
        ),
    ]
    out += [_arrow(a, b, arrows, places) for a, b in arrows]
    out += [_box(name, *place) for name, place in places.items()]
    return "\n".join([*out, "</svg>", ""])


def _places(rows: Sequence[Sequence[str]]) -> dict[str, tuple[float, float]]:
    """Package -> the middle of its box."""
    found = {}
    for k, row in enumerate(rows):
        gap = min(WIDEST_GAP, (WIDTH - 20 - len(row) * WIDE) / max(len(row) - 1, 1))
        left = (WIDTH - len(row) * WIDE - (len(row) - 1) * gap) / 2
        for n, name in enumerate(row):
            found[name] = (left + n * (WIDE + gap) + WIDE / 2, ROW * k + 20 + HIGH / 2)
    return found


def _box(name: str, x: float, y: float) -> str:
    return (
        f'<rect x="{x - WIDE / 2:g}" y="{y - HIGH / 2:g}" width="{WIDE}" height="{HIGH}" rx="8" fill="#F4F7FA" '
        f'stroke="#333" stroke-width="1.5"/>'
        f'<text x="{x:g}" y="{y - 4:g}" text-anchor="middle" font-size="25" font-weight="bold">{name}</text>'
        f'<text x="{x:g}" y="{y + 24:g}" text-anchor="middle" font-size="20" fill="#333">{SAID[name]}</text>'
    )


def _arrow(a: str, b: str, arrows: Sequence[tuple[str, str]], places: Mapping[str, tuple[float, float]]) -> str:
    """A curve from the foot of a box to the head of another; those of one box leave and come in side by side."""
    (x, y), (u, v) = places[a], places[b]
    x += _side([t for s, t in arrows if s == a], b, places)
    u += _side([s for s, t in arrows if t == b], a, places)
    y, v = y + HIGH / 2, v - HIGH / 2
    k = list(places).index(a) % len(COLOURS)
    bend = min(60.0, (v - y) * 0.6)
    return (
        f'<path d="M{x:.0f} {y:.0f}C{x:.0f} {y + bend:.0f} {u:.0f} {v - bend:.0f} {u:.0f} {v:.0f}" fill="none" '
        f'stroke="{COLOURS[k]}" stroke-width="2.5" marker-end="url(#head{k})"/>'
    )


def _side(others: list[str], one: str, places: Mapping[str, tuple[float, float]]) -> float:
    """Where, left or right of a box's middle, its arrow to or from this one ends."""
    in_order = sorted(others, key=lambda name: places[name][0])
    return (in_order.index(one) - (len(in_order) - 1) / 2) * min(34.0, (WIDE - 30) / len(in_order))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    made = drawing()
    if parser.parse_args().check:
        same = FILE.is_file() and FILE.read_text(encoding="utf-8") == made
        print("as the code is" if same else f"{FILE.name} is stale: python tools/draw_architecture.py")
        return 0 if same else 1
    FILE.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
