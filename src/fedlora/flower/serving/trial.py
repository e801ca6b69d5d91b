"""A trial: a federation's folder with its sites in it, played on this machine, on loopback.

    now = Trial(SuperLink(folder), say).serve()   SuperLink, a node for each site, all rounds; then everything ends

The server's side is that of `serve`, each site's that of `fedlora flower node`; only the proxy is missing.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

from fedlora.core.process import how_ended
from fedlora.errors import ConfigError
from fedlora.flower import processes
from fedlora.flower.serving.standing import standing
from fedlora.flower.serving.superlink import SuperLink
from fedlora.flower.serving.supervisor import Lost, Supervisor
from fedlora.flower.serving.telling import Say


class Trial(Supervisor):
    """Serves a trial's folder, with a node for each of its sites.

    Raises:
        ConfigError: the folder has no sites, because it is a federation of several machines, or not a federation.
    """

    def __init__(self, link: SuperLink, say: Say = lambda line: None, *, stop: threading.Event | None = None) -> None:
        super().__init__(link, say, stop=stop)
        self.names = [name for name in standing(self.folder).clients if self.folder.site(name).site.is_file()]
        if not self.names:
            raise ConfigError(
                f"{self.folder.path} is not a trial: its sites are on machines of their own. `fedlora flower serve` "
                f"runs the server's side."
            )
        self.nodes = dict[str, subprocess.Popen[bytes]]()

    def on_up(self) -> None:
        """Start a node for each site."""
        self._end_left()
        if any(node.status == "online" for node in self.link.nodes()):
            self._say("waiting until the SuperLink gives up the last trial's nodes: up to 60 s")
            while any(node.status == "online" for node in self.link.nodes()):
                if self.stop.wait(1.0):
                    return
        for name in self.names:
            command = [sys.executable, "-m", "fedlora.cli", "flower", "node", str(self.folder.site(name).path)]
            self.nodes[name] = processes.started(command, self._log(name), processes.environment(self._home(name)))
        self._say(f"nodes started: {', '.join(self.names)} (their lines are in {self.folder.logs}/node-NAME.log)")

    def on_down(self) -> None:
        """End the nodes, and what they started, while the SuperLink still hears that they leave: one that does not hear
        it takes them for online for a minute, and the next trial would wait that long."""
        for process in self.nodes.values():  # signal all first, so that they end in parallel
            process.terminate()
        for process in self.nodes.values():
            processes.end(process)
        if self.nodes:
            self._end_left()  # a trainer or a ClientApp may take longer to end than its node

    def also(self) -> None:
        """If one node ends, everything ends, because a trial without one of its sites would be a different trial;
        unless the site was removed: then the server no longer lets its node in."""
        for name, process in list(self.nodes.items()):
            if (code := process.poll()) is None:
                continue
            if name not in self.telling.standing().clients:
                self._say(f"the node of {name} ended: {name} was removed")
                del self.nodes[name]
                continue
            log = self._log(name)
            words = f", which ends with: {processes.last_line(log)}" if code > 0 else ""
            raise Lost(
                f"the node of {name} ended {how_ended(code)}. Its log is {log}{words}. Call this again to continue "
                f"after the last round."
            )

    def _end_left(self) -> None:
        """End the processes of this trial's nodes, including those of an earlier one that was killed."""
        for name in self.names:
            processes.end_all_of(self._home(name))

    def _home(self, name: str) -> Path:
        return self.folder.site(name).state / "flwr"

    def _log(self, name: str) -> Path:
        return self.folder.logs / f"node-{name}.log"


__all__ = ["Trial"]
