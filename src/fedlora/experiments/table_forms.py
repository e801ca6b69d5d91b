"""A table, and its text for documents: Markdown, LaTeX (booktabs, multirow)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

_IN_LATEX = str.maketrans({
    **{sign: f"\\{sign}" for sign in "&%$#_{}"}, "\\": r"\textbackslash{}", "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}", "±": r"$\pm$", "<": r"$<$", ">": r"$>$", "−": "$-$", "\n": " ",
})  # fmt: skip
_MARKED = {
    "markdown": {"best": "**{}**", "second": "<u>{}</u>"},
    "latex": {"best": r"\textbf{{{}}}", "second": r"\underline{{{}}}"},
}


@dataclass(frozen=True)
class Table:
    """caption: one paragraph. below: notes, a paragraph each. names: the number of columns that are labels; the others
    are numbers. over: a second head above each column, the same above neighbours that it spans. grouped: whether a
    label stands once for all rows below it that share it. marks: (row, column) -> "best" or "second"."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str
    below: Sequence[str] = ()
    names: int = 1
    over: Sequence[str] = ()
    grouped: bool = False
    marks: Mapping[tuple[int, int], str] = field(default_factory=dict)

    def spans(self, row: int, column: int) -> int:
        """How many rows the cell stands for: 1; of a label in groups more, and 0 below the first of its rows."""
        if not self.grouped or column >= self.names - 1:
            return 1
        mine = self.rows[row][: column + 1]
        if row and self.rows[row - 1][: column + 1] == mine:
            return 0
        after = (k for k in range(row, len(self.rows)) if self.rows[k][: column + 1] != mine)
        return next(after, len(self.rows)) - row


def plain_caption(table: Table) -> str:
    """The caption without emphasis marks."""
    return table.caption.replace("*", "")


def heads(table: Table) -> list[str]:
    """The columns' heads in one line, each with the head above it."""
    return [f"{over}: {head}" if over else head for over, head in zip(_over(table), table.columns, strict=True)]


def cells(table: Table, form: str, row: int, text: Sequence[str]) -> list[str]:
    """A row's cells with their marks. text: the cells, escaped for the form ("markdown" or "latex")."""
    marks = [table.marks.get((row, k), "") for k in range(len(text))]
    found = [_MARKED[form].get(mark, "{}").format(cell) for mark, cell in zip(marks, text, strict=True)]
    return [cell if table.spans(row, k) else "" for k, cell in enumerate(found)]


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
        for over, same in groupby(_over(table)):
            count = len(list(same))
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


def _over(table: Table) -> Sequence[str]:
    return table.over or [""] * len(table.columns)
