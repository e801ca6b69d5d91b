"""A real Slurm on this machine: a controller and two nodes of one core, without control groups. Needs root.

with slurm(folder) as cluster:
    cluster.call("sbatch", "script.sh")
    cluster.kill_node("n1")
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from support.machines import free_port, until

_PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch")
_CONF = """\
ClusterName=two
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
AuthInfo=socket={folder}/munge.sock
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdTimeout=10
KillWait=5
SchedulerParameters=sched_interval=2,batch_sched_delay=1
NodeName=n1 NodeAddr=127.0.0.1 NodeHostname=localhost Port={n1} CPUs=1 RealMemory=1000
NodeName=n2 NodeAddr=127.0.0.1 NodeHostname=localhost Port={n2} CPUs=1 RealMemory=1000
PartitionName=all Nodes=n1,n2 Default=YES State=UP
"""

slurm_needed = pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, _PROGRAMS)),
    reason=f"needs root and {', '.join(_PROGRAMS)} (apt-get install slurm-wlm munge)",
)


@dataclass
class Slurm:
    folder: Path
    environment: Mapping[str, str]
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def call(self, *words: object) -> str:
        """What a command printed on its standard output."""
        done = subprocess.run([*map(str, words)], env=self.environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def jobs(self) -> list[dict[str, str]]:
        """What Slurm knows of each task of each array."""
        lines = self.call("scontrol", "--oneliner", "show", "job").splitlines()
        return [dict(pair.split("=", 1) for pair in line.split() if "=" in pair) for line in lines]

    def begin(self, name: str, *words: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.daemons[name] = subprocess.Popen([*words], env=self.environment, stdout=log, stderr=log)

    def begin_node(self, name: str) -> None:
        self.begin(name, "slurmd", "-D", "-N", name)

    def tell_limit(self, job: str) -> None:
        """What --signal=B:USR1@120 does before the time limit: the signal to the job's own script alone."""
        scripts = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                mine = process.environ().get("SLURM_JOB_ID") == job
                scripts += [process] if mine and any("slurm_script" in word for word in process.cmdline()) else []
        for script in scripts:
            script.send_signal(signal.SIGUSR1)
        assert len(scripts) == 1, scripts

    def kill_node(self, name: str) -> None:
        """As a power cut: its daemon and all processes of its jobs are gone without a word."""
        mine = [self.daemons[name].pid]
        for process in psutil.process_iter():
            try:
                if process.environ().get("SLURMD_NODENAME") == name:
                    mine += [one.pid for one in (process.parent(), process) if one and "slurmctld" not in one.name()]
            except psutil.Error:
                continue
        for pid in dict.fromkeys(mine):
            try:
                process = psutil.Process(pid)
                if process.name() != "init" and pid not in (1, os.getpid()):
                    process.kill()
            except psutil.NoSuchProcess:
                continue
        self.daemons.pop(name).wait()


@contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """Two idle nodes, until the block ends. folder: short, for the socket's path, and readable by all."""
    (folder / "state").mkdir(parents=True)
    folder.chmod(0o755)
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    ports = {name: free_port() for name in ("controller", "n1", "n2")}
    (folder / "slurm.conf").write_text(_CONF.format(folder=folder, **ports))
    cluster = Slurm(folder, {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")})
    files = {"key-file": key, "socket": folder / "munge.sock", "pid-file": folder / "munge.pid",
             "log-file": folder / "munge.log", "seed-file": folder / "munge.seed"}  # fmt: skip
    try:
        cluster.begin("munged", "munged", "--foreground", "--force", *(f"--{k}={path}" for k, path in files.items()))
        until((folder / "munge.sock").exists, 10, "munged listens")
        cluster.begin("slurmctld", "slurmctld", "-D")
        for node in ("n1", "n2"):
            cluster.begin_node(node)
        until(lambda: cluster.call("sinfo", "-h", "-N", "-o", "%T").split() == ["idle", "idle"], 30, "two idle nodes")
        yield cluster
        cluster.call("scancel", "--me")
    finally:
        for daemon in reversed(cluster.daemons.values()):
            daemon.terminate()
        for daemon in cluster.daemons.values():
            with suppress(subprocess.TimeoutExpired):
                daemon.wait(30)
            daemon.kill()  # a node waits for its jobs to end
