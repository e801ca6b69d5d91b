"""A run in words and tables: notes on its data before it begins, and its results at the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from json import loads as json_of
from typing import Any

from rich.text import Text

from fedlora.cli.screen import Table, byte_size, console, notes, red
from fedlora.errors import counted
from fedlora.runs.attack_words import in_words
from fedlora.runs.folder import RunFolder
from fedlora.training.metrics import worst_of

Rows = Iterator[tuple[str | Text, str | Text]]
_NAMED_CLASSES = 8  # with more, a client's examples are not counted by class


def tell_attack(manifest: Mapping[str, Any]) -> None:
    """Print a warning if clients of a run are byzantine on purpose."""
    if attack := manifest.get("attack"):
        notes.print(
            f"UNDER ATTACK, on purpose: {in_words(attack, len(manifest['clients']))}. Do not use its results.",
            style="bold red",
        )


def tell_data(manifest: Mapping[str, Any], max_length: int, answer: int) -> None:
    """Print problems with a run's texts: copies, classes of one row, and texts that are too long.

    Args:
        max_length: data.max_length, in tokens. answer: evaluate.max_new_tokens, which a prompt leaves room for.
    """
    data = manifest["data"]
    counts = map(sum, zip(*(data["label_counts"] or {}).values(), strict=True))
    rows = dict(zip(data["label_names"], counts, strict=False))
    if lone := [name for name, count in rows.items() if count < 2]:
        notes.warn(
            f"at most one training example has the class {', '.join(map(repr, lone[:5]))}{', ...' * (len(lone) > 5)}: "
            f"it is hardly learned. Is it a typing error? If not, bring more examples."
        )
    if repeated := data.get("repeated"):
        notes.warn(f"{counted(repeated, 'training example')} repeat another one of the same client, and count again.")
    for name, counts in manifest["copies"].items():
        notes.warn(
            f"of the {counts['examples']} examples of {name}, {counts['copies']} are copies of training texts, so its "
            f"scores are too good: remove the copies from one of the files. (Copies within one file stay together.)"
        )
    if cut := manifest["cut"]:
        each = ("cut", "tokens", "responses")
        examples, tokens, short = (sum(part.get(what, 0) for part in cut.values()) for what in each)
        notes.warn(
            f"{counted(examples, 'training example')} of {counted(len(cut), 'client')} longer than data.max_length = "
            f"{max_length}: cut by {counted(tokens, 'token')}{_short(short)}; raise it to keep them whole."
        )
    for name, found in manifest["cut_held_out"].items():
        for how, part in found.items():
            room = f"data.max_length = {max_length}" + (f" less evaluate.max_new_tokens = {answer}" * (how == "asked"))
            what = "prompts to answer" if how == "asked" else "examples"
            notes.warn(
                f"{part['cut']} of {part['examples']} {what} of {name} are longer than {room} and were cut by "
                f"{part['tokens']} tokens{_short(part.get('responses', 0))}; their scores are for the shortened texts."
            )


def _short(responses: int) -> str:
    """In how many of them the answer itself was cut (it alone fills data.max_length)."""
    return f", {counted(responses, 'response')} among them" if responses else ""


def show_run(folder: RunFolder) -> None:
    """Show a finished run on one screen."""
    s, manifest = folder.read_json("summary.json"), folder.read_json("manifest.json")
    tell_attack(manifest)
    if len(manifest["clients"]) <= 12 and not s.get("privacy"):  # a private run shows no single client
        console.print(_clients(s, manifest, folder.metrics()))
    title = f"{s['method']}, {counted(s['rounds'], 'round')}, {counted(s['clients'], 'client')}"
    table = Table("", "", title=title, show_header=False)
    for row in _rows(s):
        table.add_row(*row)
    console.print(table)
    if s.get("robust"):
        console.print(_weighed(s["robust"], folder.read_json("config.json")["robust"]["rule"]))
    if s["gauge_drift"]:
        console.print(
            "gauge check: the same updates in coordinates of condition number 10; the model should stay the same"
        )
    _show_samples(folder)
    made = [name for name in ("adapter", "best", "clients", "plots", "samples.jsonl") if (folder.path / name).exists()]
    console.print(f"in {folder.path}: {', '.join(made)}, metrics.jsonl, manifest.json")


def _rows(s: Mapping[str, Any]) -> Rows:
    """What a run came to, and what it cost."""
    metric = s["metric"]
    if s.get("attack"):
        yield red("under attack"), red(in_words(s["attack"], s["clients"]))
    for name in ("last", "best"):
        score, test = s["validation"][name], s["test"][name]
        if score or test:
            when = f"round {s['best_round'] if name == 'best' else s['rounds']}"
            scores = [f"validation {number(score[metric])}"] if score else []
            scores += [f"test [bold]{number(test[metric])}[/]"] if test else []
            yield f"{metric}, {name} ({when})", Text.from_markup(", ".join(scores))
    others = {name: x for name, x in s["test"]["last"].items() if "/" not in name and name not in (metric, "worst")}
    if others:
        yield "also on test, last", ", ".join(f"{name.replace('_', ' ')} {number(x)}" for name, x in others.items())
    if s.get("stopped_early"):
        yield "stopped early", f"after round {s['rounds']} of {s['stopped_early']['of']}"
        yield "because of", s["stopped_early"]["why"]
    own = {client: scores[metric] for client, scores in s["clients_at_end"].items()}
    if (worst := worst_of(metric, list(own), own.get)) is not None:
        yield "worst client's own readout", f"{worst}, {number(own[worst])}"
    if s["bytes"]:  # a private run does not report it
        up = s["bytes"]["up_adapter"] + s["bytes"]["up_heads"]
        yield "sent up / down", f"{byte_size(up)} / {byte_size(s['bytes']['total'] - up)}"
    if s["seconds"]:
        yield "seconds", ", ".join(f"{phase} {spent:.1f}" for phase, spent in s["seconds"].items())
    if s["server_rank"] is not None:
        yield "rank of the server's update", f"{s['server_rank']:.1f} (mean over modules)"
    if s["padded_error"] is not None:
        of = "plain mean, which this server does not compute" if s.get("robust") else "true mean"
        yield "zero-padded factor averaging would be off by", f"{s['padded_error']:.1%} of the {of}"
    for method, drift in (s["gauge_drift"] or {}).items():
        yield f"gauge check: {method} moves by", Text(f"{drift:.1e}") if drift < 1e-3 else red(f"{drift:.1%}")
    if s["refused"]:
        yield "client rounds left out", str(s["refused"])
    if spent := s.get("privacy"):
        yield from _privacy_rows(spent)


def _privacy_rows(spent: Mapping[str, Any]) -> Rows:
    from fedlora.privacy.accounting import epsilon_up  # imports torch

    who = "all clients a round" if spent["sampling"] == 1.0 else f"each client with chance {spent['sampling']:g}"
    ledger = spent["ledger"]
    yield (
        "epsilon of the planned rounds",
        f"{epsilon_up(spent['epsilon_planned'])} at delta {spent['delta']:g} ({spent['rounds_planned']} rounds, noise "
        f"multiplier {spent['noise_multiplier']:.3f}, {who})",
    )
    yield "epsilon of the rounds played", epsilon_up(spent["epsilon"])
    yield (
        "epsilon of the population, all runs",
        f"{epsilon_up(ledger['epsilon'])} in {ledger['events']} releases ({ledger['population']})",
    )


def _clients(s: dict[str, Any], manifest: dict[str, Any], lines: Sequence[dict[str, Any]]) -> Table:
    """A row for each client. A column without values is left out."""
    metric, data = s["metric"], manifest["data"]
    own_test, names = data.get("own_test") or {}, data["label_names"] or []
    named = 0 < len(names) <= _NAMED_CLASSES
    readout = ["own readout, test"] if s["clients_at_end"] else []
    heads = [*([" / ".join(names)] if named else []), "last loss", *readout]
    clients = Table("client", "rank", "examples", *heads, title="Clients")
    for client, rank in manifest["clients"].items():
        reported = [line["examples"][client] for line in lines if client in line.get("examples", {})]
        row = [client, str(rank), _examples(data["train"][client]["examples"], reported)]
        if named:
            counts = (data["label_counts"] or {}).get(client, [])
            row.append(" / ".join(map(str, [*counts, *[0] * (len(names) - len(counts))])))
        loss, at_end = lines[-1]["losses"].get(client), s["clients_at_end"].get(client)
        row.append("" if loss is None else f"{loss:.3f}")
        if s["clients_at_end"]:
            of = f" of {own_test[client]['examples']}" if own_test.get(client) else ""
            row.append(f"{number(at_end[metric])}{of}" if at_end else "")
        clients.add_row(*row)
    return clients


def _examples(rows: int, reported: Sequence[float]) -> str:
    """A client's rows; and what its own program counted instead, as far as it differs."""
    other = sorted({round(count) for count in reported} - {0, rows})
    many = f"; it said {other[0]:,}{f' to {other[-1]:,}' if other[1:] else ''}" if other else ""
    idle = sum(not count for count in reported)
    return f"{rows}{many}" + (f"; abstained in {counted(idle, 'round')}" if idle else "")


def _weighed(clients: Mapping[str, Mapping[str, float]], rule: str, most: int = 12) -> Table:
    """How a robust rule weighed each client; those that lost most come first (`server.judged.over_rounds`)."""
    table = Table("client", "rounds", "left out", "mean weight", "after the rule", title=f"What {rule} did")
    for name, one in list(clients.items())[:most]:
        counts = f"{one['rounds']:.0f}", f"{one['left_out']:.0f}"
        table.add_row(name, *counts, f"{one['weight']:.1%}", f"{one['coefficient']:.1%}")
    return table


def _show_samples(folder: RunFolder, most: int = 2, width: int = 200) -> None:
    """Print a language model's first answers, each on one line; samples.jsonl has all of them."""
    path = folder.path / "samples.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    for row in map(json_of, lines[:most]):
        for name in ("prompt", "wanted", "before", "after"):
            text = " ".join(row[name].split())
            shown = text if len(text) <= width else text[: width - 3] + "..."
            console.print(f"{name + ':':8} {shown or '(nothing)'}")
        console.print()


def number(score: float | None) -> str:
    """A score in three digits; "no number" for None (null in a file)."""
    return "no number" if score is None else f"{score:.3f}"
