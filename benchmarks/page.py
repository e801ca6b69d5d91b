"""Run the benchmarks, and fill the tables of docs/evidence/benchmarks.md from what they stored.

    python benchmarks/page.py                   the page from benchmarks/results, without running anything
    python benchmarks/page.py --run             all of them anew, then the page: ten minutes on two quiet cores
    python benchmarks/page.py --run --quick     small, into build/bench, the page untouched: whether all of it runs
    python benchmarks/page.py --run --only merging,dense

Between the page's markers stands a table of one result (`bench: aggregation methods`), how it was measured (`bench:
aggregation measured`), or of all results the goals (`bench: goals`) or the machines (`bench: machines`).
`tests/test_benchmarks.py` compares page and results.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from measure import as_markdown

ROOT = Path(__file__).parent.parent
RESULTS, SMALL = ROOT / "benchmarks" / "results", ROOT / "build" / "bench"
PAGE = ROOT / "docs" / "evidence" / "benchmarks.md"
MARKED = re.compile(r"(<!-- bench: (\S+)(?: ([^>]+?))? -->\n).*?(<!-- end of bench -->)", re.DOTALL)
# Result -> script and options, in the order of the page. Each takes --json FILE.
BENCHMARKS = {
    "aggregation": "aggregation.py",
    "small_modules": "small_modules.py --repeats 3",
    "dense": "dense.py",
    "exactness": "exactness.py --quick --every 5",
    "robust_rules": "robust_rules.py --repeats 3",
    "many_clients": "many_clients.py --d 768 --clients 1000,3000",
    "merging": "merging.py --layers 16",
    "engine": "engine.py --repeats 2",
    "training": "training.py --repeats 2",
}
# What makes one small, where that is not --quick.
QUICK = {"many_clients": "--clients 100", "exactness": "--every 97"}


def stored(folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """Result -> what its benchmark wrote, in the order of the page; those that no benchmark here writes last."""
    paths = {path.stem: path for path in sorted(folder.glob("*.json"))}
    names = [*(name for name in BENCHMARKS if name in paths), *(name for name in paths if name not in BENCHMARKS)]
    return {name: json.loads(paths[name].read_text(encoding="utf-8")) for name in names}


def filled(page: str, results: Mapping[str, Mapping[str, Any]]) -> str:
    """The page with each part between markers as the results have it."""

    def part(found: re.Match[str]) -> str:
        begin, name, what, end = found.groups()
        if name == "goals":
            text = goals(results)
        elif name == "machines":
            text = machines(results)
        elif name not in results:
            text = "Not measured yet.\n"
        elif what == "measured":
            text = measured(results[name])
        else:
            text = as_markdown(results[name]["tables"][what])
        return f"{begin}{text}{end}"

    return MARKED.sub(part, page)


def goals(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Every goal of every result; a missed one in bold."""
    rows = [["", "measured", "goal"]]
    for what, figure, _, bound, met in (row for result in results.values() for row in result.get("goals", ())):
        rows.append([what, figure if met == "yes" else f"**{figure}**", bound])
    return as_markdown(rows)


def measured(result: Mapping[str, Any]) -> str:
    """The command and the code of a result."""
    took = f" in {result['seconds']} s" if "seconds" in result else ""
    return f"`{result['machine']['command']}`{took}, {result['date']}, commit {result['machine']['commit']}\n"


def machines(results: Mapping[str, Mapping[str, Any]]) -> str:
    """What the results were measured on; one line where it was one machine."""
    found = [result["machine"] for name, result in results.items() if name in BENCHMARKS]
    lines = (f"{m['processor']}, {m['cores']} cores, torch {m['torch']}, Python {m['python']}\n" for m in found)
    return "".join(dict.fromkeys(lines))


def run(only: list[str], folder: Path, *, quick: bool) -> list[str]:
    """One benchmark after the other, each in a process of its own; which of them failed."""
    folder.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in only:
        script, *options = BENCHMARKS[name].split() + (QUICK.get(name, "--quick").split() if quick else [])
        command = [sys.executable, str(ROOT / "benchmarks" / script), *options]
        began = time.perf_counter()
        print(f"== {name}", flush=True)
        done = subprocess.run([*command, "--json", str(folder / f"{name}.json")], check=False, cwd=ROOT)
        failed += [name] if done.returncode else []
        print(f"== {name}: {time.perf_counter() - began:.0f} s{' FAILED' * (name in failed)}\n", flush=True)
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true")
    parser.add_argument("--quick", action="store_true", help="with --run")
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(BENCHMARKS), help="with --run")
    args = parser.parse_args()
    failed = run(args.only, SMALL if args.quick else RESULTS, quick=args.quick) if args.run else []
    if not args.quick:
        PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), stored()), encoding="utf-8")
    print(goals(stored(SMALL if args.quick else RESULTS)))
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}; what each printed above says why.")


if __name__ == "__main__":
    main()
