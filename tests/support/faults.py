"""The table of faults in docs/how-to/federation.md: `python tests/support/faults.py --write` puts it there, after the
long run (`make deployment-all`) has written down what was said.

Each line is a fault that a test has made, what came of it, and the sentence that somebody read: at the site, or at the
server.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "how-to" / "federation.md"
SEEN = ROOT / "tests" / "deployment" / ".faults.jsonl"
BEGIN, END = "<!-- faults: written by tests/support/faults.py --write -->", "<!-- end of faults -->"
_VARYING = [
    (r"^\S*\d{4}-\d\d-\d\d[T ][\d:.,]+\S*\s*", ""),  # when it was said
    (r"^\d\d:\d\d(:\d\d)?\s+", ""),
    (r"/\S*?/(?=(server|acme|berlin|cork|stranger)(/|\b))", ""),  # the test's own folder
    (r"\bpid \d+", "pid 4711"),
    (r"SHA256:[\w+/=]+", "SHA256:..."),
]


def tell(fault: str, outcome: str, where: str, line: str) -> None:
    """Write down what was said. A fault that is told twice stands in the table once, as it was told last."""
    for pattern, instead in _VARYING:
        line = re.sub(pattern, instead, line.strip())
    entry = {"fault": fault, "outcome": outcome, "where": where, "line": line}
    kept = [found for found in told() if found["fault"] != fault]
    SEEN.write_text("".join(json.dumps(one) + "\n" for one in [*kept, entry]), encoding="utf-8")


def told() -> list[dict[str, str]]:
    return [json.loads(line) for line in SEEN.read_text().splitlines()] if SEEN.exists() else []


def table(entries: list[dict[str, str]]) -> str:
    """Markdown. A cell holds one line; bars in it are escaped. Two columns, so that a phone has room for the line."""
    rows = ["| fault and effect | place and message |", "|---|---|"]
    for entry in entries:
        line = textwrap.shorten(entry["line"], 50, placeholder=" ...").replace("|", "\\|").replace("`", "'")
        rows.append(f"| **{entry['fault']}**: {entry['outcome']} | {entry['where']}: `{line}` |")
    return "\n".join(rows)


def written(page: str, entries: list[dict[str, str]]) -> str:
    """The page with its table of faults."""
    begin, end = page.index(BEGIN) + len(BEGIN), page.index(END)
    return f"{page[:begin]}\n\n{table(entries)}\n\n{page[end:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the table into the page")
    arguments = parser.parse_args()
    if not told():
        print(f"{SEEN} is not there: `make deployment-all` writes it.", file=sys.stderr)
        return 1
    text = written(PAGE.read_text(encoding="utf-8"), told())
    if arguments.write:
        PAGE.write_text(text, encoding="utf-8")
    else:
        print(table(told()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
