"""How processes that fedlora started end. Kind of evidence: contract, with a real shell and its child."""

from __future__ import annotations

import signal
import subprocess

from fedlora.core.process import end


def test_what_ignores_the_first_signal_is_killed_with_its_group() -> None:
    """Both ignore SIGTERM, for a child inherits that. The pipe closes when the last of them is gone."""
    shell = "trap '' TERM; sleep 60 & echo started; wait"
    process = subprocess.Popen(["sh", "-c", shell], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None and process.stdout.readline() == b"started\n"
    end(process, seconds=0.2)
    assert process.returncode == -signal.SIGKILL and process.stdout.read() == b""
    process.stdout.close()
