"""A trial's sites, beside the server: each a folder like a real one, with a key that is admitted at once."""

from __future__ import annotations

from fedlora.core import files
from fedlora.data import TextData
from fedlora.flower.places import FederationFolder
from fedlora.flower.setup.dealing import write_rows
from fedlora.flower.site.join_site import fill_site
from fedlora.flower.terms.agreement import Facts
from fedlora.flower.terms.site_file import Site
from fedlora.runs.config import RunConfig


def write_site(there: FederationFolder, name: str, data: str | TextData, config: RunConfig, facts: Facts) -> None:
    """Its folder, and its key and request where `fedlora flower admit` puts them."""
    site = there.site(name)
    for folder in (site.path.parent, site.path):
        folder.mkdir(mode=0o700, exist_ok=True)
    where = data if isinstance(data, str) else "data.jsonl"
    if isinstance(data, TextData):
        write_rows(site.path / where, data)
    device = None if config.model.device == "auto" else config.model.device
    method = config.method.name if ":" in config.method.name else None  # who makes a trial is its sites' operator, too
    said = Site(name=name, data=where, model=config.model.path, device=device, method=method)
    fill_site(site.path, there.join(name).read_bytes(), said, facts.table())
    files.write(there.request(name), site.request.read_bytes())
    files.write(there.key(name), site.public_key.read_bytes())


__all__ = ["write_site"]
