"""What every tutorial begins with, unseen: an empty folder to work in, and %%bash that fails where a command fails.

IPython's own %%bash goes on when any command but the last one failed, and shows progress bars and warnings on the page.
Here standard error is shown where a cell fails, so that no page needs `2>/dev/null`, which would hide errors.
A cell that is to show an error says `2>&1`.

What a command prints is what a terminal as wide as the page shows, without colours. The folder's own name is nobody's
business: `HOME` stands for it.
"""

import atexit
import os
import pty
import re
import subprocess
import sys
import tempfile
import termios
import textwrap
import tty
import warnings

from IPython import get_ipython

WIDTH = 90  # letters of code in a line of the site, on a wide screen; a page with wider tables sets its own
HOME = "/home/you/work"

_FOLDER = tempfile.TemporaryDirectory()
atexit.register(_FOLDER.cleanup)
os.chdir(_FOLDER.name)
os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]  # this Python's `fedlora`
os.environ |= {
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore::FutureWarning",  # transformers of itself
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "TTY_COMPATIBLE": "0",  # rich: no colours and nothing that moves, terminal or not
    "NO_COLOR": "1",
}
for _name in ("FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE"):  # the kernel sets them: commands would draw spinners
    os.environ.pop(_name, None)
warnings.filterwarnings("ignore", "IProgress not found")  # tqdm, in a notebook without widgets
warnings.filterwarnings("ignore", category=FutureWarning)


def bash(line: str, cell: str) -> None:
    """The cell magic: what its commands print. Where one fails, its standard error too, and it raises."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        screen, end = pty.openpty()
        tty.setraw(end)  # a line ends as the program ends it
        termios.tcsetwinsize(end, (50, WIDTH))
        commands = ["bash", "-euo", "pipefail", "-c", cell]
        with subprocess.Popen(commands, stdout=end, stderr=errors, env=os.environ | {"COLUMNS": str(WIDTH)}) as running:
            os.close(end)
            print(_shown(_all_of(screen)), end="")
        if running.returncode:
            errors.seek(0)
            print(errors.read(), end="", file=sys.stderr)
            raise subprocess.CalledProcessError(running.returncode, cell)


def _all_of(screen: int) -> str:
    """What was written, once all who could write have ended."""
    found = b""
    try:
        while part := os.read(screen, 65536):
            found += part
    except OSError:  # how Linux says that a terminal's other end is closed
        pass
    finally:
        os.close(screen)
    return found.decode("utf-8")


def _shown(printed: str) -> str:
    """In lines that fit, under a name of the folder that is the same at every build. Tables keep their shape."""
    sentence = textwrap.TextWrapper(WIDTH, break_long_words=False, break_on_hyphens=False)
    lines = []
    for said in printed.splitlines():
        if said[:1] in ("│", "┃"):
            lines.append(re.sub(re.escape(_FOLDER.name) + r"[^\s│]*", _as_long, said))
        else:
            said = said.replace(_FOLDER.name, HOME)
            lines += [said] if len(said) <= WIDTH else sentence.wrap(said)
    return "\n".join(lines) + "\n" * bool(lines)


def _as_long(found: re.Match[str]) -> str:
    return found[0].replace(_FOLDER.name, HOME).ljust(len(found[0]))


get_ipython().register_magic_function(bash, "cell", "bash")
