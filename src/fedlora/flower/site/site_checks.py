"""Checks of a site: its files, its data and its base model, read by the code of its rounds; its server and its clock.
For `fedlora flower site`, `fedlora flower node` and `fedlora doctor SITE`.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from fedlora.errors import ConfigError, FedLoRAError
from fedlora.flower.places import SiteFolder
from fedlora.flower.site.reach import look, private_key
from fedlora.flower.terms import certificates
from fedlora.flower.terms.agreement import Facts, check
from fedlora.flower.terms.joining import JoinFile
from fedlora.flower.terms.privacy import promise
from fedlora.flower.terms.settings import FederationSettings
from fedlora.flower.terms.site_file import Site

Row = tuple[str, str, bool | None]  # (check, finding, whether it is sound); None: not yet, by nobody's fault


def is_site(folder: Path) -> bool:
    """Whether this is a site's folder, and not a federation's at its server."""
    return SiteFolder(folder).site.is_file() or SiteFolder(folder).join.is_file()


def checked_site(folder: Path, *, server: bool = True) -> list[Row]:
    """All checks of a site's folder; those of its server, if asked for."""
    here = SiteFolder(folder.resolve())
    rows, known = checked_files(here)
    if known is None:
        return rows
    work, _ = checked_work(*known)
    return [*rows, *work, *(checked_server(known[0], here) if server else ())]


def checked_files(here: SiteFolder) -> tuple[list[Row], tuple[JoinFile, Site] | None]:
    """Check the folder's own files. Also returns its content, if that can be read."""
    try:
        join, site = JoinFile.read(here.join), Site.read(here.site)
    except FedLoRAError as error:
        return [("site", str(error), False)], None
    said = f"{site.name}, rank {join.rank} when it joined, of {join.federation} at {join.address}"
    if same := join.site == site.name:
        return [("site", said, same), _key(here)], (join, site)
    return [("site", f"site.toml says {site.name!r}, but the join file is for {join.site!r}", same)], None


def checked_work(join: JoinFile, site: Site) -> tuple[list[Row], Facts]:
    """Check the site's data and base model: whether a round could use them. Also returns the facts for the server."""
    try:
        settings = FederationSettings.from_travelling(join.settings)
    except FedLoRAError as error:
        return [("settings", str(error), False)], Facts()
    rows = _data(settings, join, site)
    if settings.privacy is not None:  # the server guarantees it; a site sets nothing
        rows.append(("privacy", promise(settings.privacy, settings.run.rounds), True))
    base, facts = _base(settings, join, site)
    return [*rows, *base], facts


def _data(settings: FederationSettings, join: JoinFile, site: Site) -> list[Row]:
    from fedlora.runs.client_data import deal

    try:
        dealt = deal(settings.for_site(site, join.rank), None)
        train = dealt.parts[site.name]
        if not len(train):
            raise ConfigError(f"{site.data} leaves no example to train on.")
    except FedLoRAError as error:
        return [("data", str(error), False)]
    held = ""
    for words, parts in (("to validate", dealt.own_validation), ("to test", dealt.own_test)):
        held += f", {len(parts[site.name])} {words}" if site.name in parts else ""
    rows: list[Row] = [("data", f"{site.data}: {len(train)} examples to train on{held}", True)]
    if train.labels is not None:
        counts = Counter(train.labels)
        named = ", ".join(f"{name} {counts[k]}" for k, name in enumerate(train.label_names))
        none = [name for k, name in enumerate(train.label_names) if not counts[k]]
        note = f"; no examples of {', '.join(none)} here: the model learns this from other sites" if none else ""
        rows.append(("classes", named + note, True))
    return rows


def _base(settings: FederationSettings, join: JoinFile, site: Site) -> tuple[list[Row], Facts]:
    """Compare the base model and the versions with the server's facts in the join file."""
    from fedlora.flower.terms.facts import model_facts

    try:
        facts = model_facts(site.model, settings)
        server = Facts.from_table(join.facts)
        check(server, facts, f"site {site.name!r}", whole=False)
    except FedLoRAError as error:
        return [("base model", str(error), False)], Facts()
    same = "as the server's" if server.base else "and the server knows none of it yet"
    return [("base model", f"{site.model}: {facts.base[:12]}, {same}", True)], facts


def checked_server(join: JoinFile, here: SiteFolder) -> list[Row]:
    """Whether the server is there, lets this site in, and has the same time."""
    found = look(join, here)
    sound = None if found.fate == "not admitted" else found.fate == "admitted"
    return [("server", found.why, sound)]


def _key(here: SiteFolder) -> Row:
    try:
        private_key(here.key)
        fingerprint = certificates.fingerprint(here.public_key.read_text(encoding="utf-8"))
    except (FedLoRAError, OSError) as error:
        return ("key", str(error), False)
    return ("key", fingerprint, True)


__all__ = [
    "Row", "checked_files", "checked_server", "checked_site", "checked_work", "is_site",
]  # fmt: skip
