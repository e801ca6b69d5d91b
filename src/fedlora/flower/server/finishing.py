"""The work after a federation's last round: the last measurements, trackers, a summary, and adapter folders like those
of `fedlora run`. What it writes holds no path of a machine.

server/adapter/      the last round's model          server/best/      the best round's
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from fedlora.core import files
from fedlora.flower.grid import BoundedGrid
from fedlora.flower.scores import SiteRound
from fedlora.flower.server.opening import Opening
from fedlora.flower.terms.settings import FederationSettings
from fedlora.given_files import RECORDS, parse_json, read_given
from fedlora.privacy.releases import filtered
from fedlora.runs.exported import FOLDERS, BaseName, Exports, base_name, global_adapter, named
from fedlora.runs.finishing import results
from fedlora.runs.folder import plain
from fedlora.runs.manifest import code_facts, shown_rank
from fedlora.runs.private_run import guarantee
from fedlora.runs.stopping import Line
from fedlora.server.judged import over_rounds

if TYPE_CHECKING:
    from fedlora.flower.server.federation import Federation


def finish(grid: BoundedGrid, federation: Federation) -> dict[str, Any]:
    """Write adapters, their scores, and the summary. The summary comes last: if it exists, everything does."""
    opening, private, state = federation.opening, federation.private, federation.state
    settings, home, lines, best = opening.settings, opening.home, federation.lines(), federation.best
    chosen = {"last": state}
    if (found := federation.best_state()) is not None:
        chosen["best"] = found
    at_sites = federation.measure(grid, "test") if settings.share("test") else SiteRound()
    judged = over_rounds(lines)
    spent = None if private is None else private.spent(state.round)
    exports = _exports(federation, None if spent is None else guarantee(spent))
    tested: dict[str, Mapping[str, float]] = {}  # of the server's model; a method without one has none
    for name, one in chosen.items() if federation.server.has_global_model(state.server) else ():
        if name == "best" and one.round == state.round:
            tested[name] = tested["last"]
        elif (test := opening.at_server.test) is not None:
            tested[name] = test.evaluate(federation.server, one)
        else:
            tested[name] = {}
        scores, by = tested[name], "server"
        if not scores and one.round == state.round:  # the sites measured this state
            scores, by = {k: v for k, v in at_sites.mean().items() if k != "examples"}, "the sites"
        model = global_adapter(federation.server, one)
        exports.write(home.server / FOLDERS[name], model, one.round, scores, by=by if scores else "server")
    federation.trackers.close({k: (one.round, tested.get(k, {})) for k, one in chosen.items()})
    stopped = federation.ended
    if stopped is None and private is not None and federation.stopped == "budget":
        why = private.releases.why_spent(state.round)
        stopped = {"round": state.round, "of": settings.run.rounds, "best_round": None, "best": None, "why": why}
    summary = _summary(federation, best, at_sites, tested, judged, stopped)
    if spent is not None:
        summary = filtered("server/summary.json", {**summary, "privacy": spent})
    files.write(home.summary, json.dumps(plain(summary), indent=2, sort_keys=True) + "\n")
    return dict(plain(summary))


def fitting_summary(path: Path, settings: FederationSettings, rounds: int) -> dict[str, Any] | None:
    """A federation's summary, if it is of these settings and of this number of rounds; None: there is work left."""
    try:
        found = parse_json(read_given(path, RECORDS), nan_as_none=True)
        same = found["rounds"] == rounds and found["settings"] == settings.agreed()
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return dict(found) if same else None


def _summary(
    federation: Federation, best: Line | None, at_sites: SiteRound, tested: Mapping[str, Mapping[str, float]],
    judged: Mapping[str, Any], stopped: Mapping[str, Any] | None,
) -> dict[str, Any]:  # fmt: skip
    """Any federation's summary; `privacy.releases` removes what a private one may not release."""
    settings, choosing, lines = federation.opening.settings, federation.opening.choosing, federation.lines()
    return {
        **results(
            federation.server, federation.state, choosing.metric, lines, best, tested,
            settings.data.label_names or [], stopped, judged,
            scores="site_mean" if choosing.by == "sites" else "metrics",
        ),
        "federation": settings.id,
        "of": settings.run.rounds,
        "measured_by": choosing.by,
        "site_test": {
            "sites": at_sites.facts()["site_metrics"], "mean": at_sites.mean(), "unmeasured": dict(at_sites.unmeasured),
        },
        "seconds": sum(line["seconds"] or 0.0 for line in lines),
        "adapter": "last" in tested,
        "versions": code_facts()["versions"],
        "settings": settings.agreed(),
    }  # fmt: skip


def _exports(federation: Federation, privacy: str | None) -> Exports:
    """Writes adapters of the federation's states. privacy: the guarantee of a private federation, in words."""
    opening = federation.opening
    settings, base = opening.settings, _base(opening)
    config = settings.as_run(base.name or "model")
    return Exports(
        _facts(federation), config, named(opening.spec, base.name or PurePath(str(settings.base)).name),
        opening.at_server.tokenizer, settings.data.label_names or (), base=base, privacy=privacy,
    )  # fmt: skip


def _base(opening: Opening) -> BaseName:
    """The base model's name: its public name, or otherwise its directory's name, and a digest."""
    model = str(opening.settings.base)
    if (found := base_name(model, opening.at_server.digests)).name is not None:
        return found
    short = PurePath(model).name
    digest = f" Its weights have the digest `{agreed}`." if (agreed := opening.join.facts.get("base")) else ""
    return BaseName(
        None,
        f"a local directory, `{short}`",
        f"Each site has its own copy of it; at the server it is called `{short}`, and adapter_config.json names it so: "
        f"put the path of your copy into its `base_model_name_or_path`.{digest}\n",
    )


def _facts(federation: Federation) -> dict[str, Any]:
    """The facts for cards, in the form of a run's manifest. clients: those whose training is in the model, also if they
    left."""
    opening, policy, lines = federation.opening, federation.policy, federation.lines()
    settings, here = opening.settings, opening.at_server
    clients: dict[str, int | str] = {name: shown_rank(policy.client(name)) for name in policy.clients}
    if settings.privacy is None:  # the card of a private one tells nobody who took part
        counted = [name for line in lines for name in line["weights"]]
        clients = {name: rank for name, rank in clients.items() if name in counted}
        clients |= {name: "left" for name in counted if name not in clients}
    examples = {name: count for line in lines for name, count in line["examples"].items()}  # with its last upload
    return {
        **code_facts(),
        "config_digest": opening.join.terms()[:16],
        "model": {"sha256": here.digests},
        "data": {
            "train": {name: {"examples": examples.get(name)} for name in clients},
            "label_names": settings.data.label_names or [],
            "label_counts": None,
        },
        "clients": clients,
        "method": repr(federation.server.method),
        "answer_ends": list(here.ends),
        "local_round_unless": "; or by a program of a site's own, which says nothing of this",
    }
