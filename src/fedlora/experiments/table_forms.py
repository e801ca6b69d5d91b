"""A table as text for documents: Markdown, LaTeX (booktabs, multirow), HTML."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from itertools import groupby

from fedlora.experiments.table_source import Table

_IN_LATEX = str.maketrans({
    **{sign: f"\\{sign}" for sign in "&%$#_{}"}, "\\": r"\textbackslash{}", "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}", "±": r"$\pm$", "<": r"$<$", ">": r"$>$", "−": "$-$", "\n": " ",
})  # fmt: skip
_MARKED = {
    "markdown": {"best": "**{}**", "second": "<u>{}</u>"},
    "latex": {"best": r"\textbf{{{}}}", "second": r"\underline{{{}}}"},
    "html": {"best": "<b>{}</b>", "second": "<u>{}</u>"},
}


def plain_caption(table: Table) -> str:
    """The caption without emphasis marks."""
    return table.caption.replace("*", "")


def heads(table: Table) -> list[str]:
    """The columns' heads in one line, each with the head above it."""
    return [f"{over}: {head}" if over else head for over, head in zip(_over(table), table.columns, strict=True)]


def cells(table: Table, form: str, row: int, text: Sequence[str]) -> list[str]:
    """A row's cells with their marks. text: the cells, escaped for the form ("markdown", "latex" or "html")."""
    marks = [table.marks.get((row, k), "") for k in range(len(text))]
    found = [_MARKED[form].get(mark, "{}").format(cell) for mark, cell in zip(marks, text, strict=True)]
    return [cell if table.spans(row, k) or form == "html" else "" for k, cell in enumerate(found)]


def markdown(table: Table) -> str:
    """A table with its last line break, without its caption. Numbers stand to the right."""

    def line(row: Sequence[str]) -> str:
        return "| " + " | ".join(row) + " |\n"

    def text(row: Sequence[str]) -> list[str]:
        return [cell.replace("|", r"\|").replace("\n", " ") for cell in row]

    body = [line(cells(table, "markdown", k, text(row))) for k, row in enumerate(table.rows)]
    rule = [":---" if k < table.names else "---:" for k in range(len(table.columns))]
    return "".join([line(text(heads(table))), line(rule), *body])


def latex(table: Table) -> str:
    r"""A tabular for the packages booktabs and, where labels stand for several rows, multirow."""

    def line(row: Sequence[str]) -> str:
        text = " & ".join(row)
        return ("{}" if text.lstrip().startswith(("[", "*")) else "") + text + r" \\"  # or \\ before takes an argument

    def told(row: Sequence[str]) -> list[str]:
        return [cell.translate(_IN_LATEX) for cell in row]

    kinds = "l" * table.names + "r" * (len(table.columns) - table.names)
    made = [f"% {plain_caption(table)}", rf"\begin{{tabular}}{{{kinds}}}", r"\toprule"]
    if any(table.over):
        spans, rules, at = [], "", 1
        for over, count in _runs(_over(table)):
            spans.append(
                rf"\multicolumn{{{count}}}{{c}}{{{over.translate(_IN_LATEX)}}}" if over else " & " * (count - 1)
            )
            rules += rf"\cmidrule(lr){{{at}-{at + count - 1}}}" if over else ""
            at += count
        made += [line(spans), rules]
    made += [line(told(table.columns)), r"\midrule"]
    for k, row in enumerate(table.rows):
        if k and table.grouped and table.spans(k, table.names - 2):  # a new block, or a new row of one
            made.append(r"\midrule" if table.names > 2 and table.spans(k, 0) else r"\addlinespace")
        made.append(line([
            rf"\multirow[t]{{{count}}}{{*}}{{{cell}}}" if (count := table.spans(k, c)) > 1 else cell
            for c, cell in enumerate(cells(table, "latex", k, told(row)))
        ]))  # fmt: skip
    return "\n".join([*made, r"\bottomrule", r"\end{tabular}"])


def html(table: Table, kind: str = "") -> str:
    """A <table> that scrolls by itself where it is wider than the screen. kind: its class."""

    def head(text: str, count: int = 1, kind: str = "") -> str:
        of = f' scope="{"colgroup" if count > 1 else "col"}"' + (f' colspan="{count}"' if count > 1 else "")
        named = f' class="{kind}"' if kind else ""
        return f"<th{of}{named}>{escape(text)}</th>"

    caption = re.sub(r"\*(\S.*?)\*", r"<i>\1</i>", escape(table.caption))
    wide, label = " wide" * (len(table.columns) > 3), escape(plain_caption(table)) or escape(table.columns[0])
    made = [f'<div class="scroll{wide}" role="region" tabindex="0" aria-label="{label}">']
    made.append(f'<table class="{kind or "grouped" * table.grouped}">')
    made += [f"<caption>{caption}</caption>"] if caption else []
    made.append("<thead>")
    if any(table.over):
        spans = [head(text, count, "over" if text else "") for text, count in _runs(_over(table))]
        made.append(f"<tr>{''.join(spans)}</tr>")
    labels = table.names if table.grouped else 1
    named = [head(text, kind="name" if k < labels else "") for k, text in enumerate(table.columns)]
    made.append(f"<tr>{''.join(named)}</tr></thead>\n<tbody>")
    for k, row in enumerate(table.rows):
        told = []
        for c, cell in enumerate(cells(table, "html", k, [escape(cell) for cell in row])):
            if count := table.spans(k, c):
                more = f' rowspan="{count}"' if count > 1 else ""
                told.append(f'<th scope="row"{more}>{cell}</th>' if c < labels else f"<td>{cell}</td>")
        ground = ' class="paper"' if table.grouped and row[table.names - 1] == "paper" else ""
        made.append(f"<tr{ground}>{''.join(told)}</tr>")
    return "\n".join([*made, "</tbody></table></div>"])


def _over(table: Table) -> Sequence[str]:
    return table.over or [""] * len(table.columns)


def _runs(labels: Sequence[str]) -> list[tuple[str, int]]:
    """(label, how many neighbours share it)."""
    return [(label, len(list(same))) for label, same in groupby(labels)]
