"""What every tutorial begins with, unseen: an empty folder to work in, and %%bash that fails where a command fails.

IPython's own %%bash goes on when any command but the last one failed, and shows progress bars and warnings on the page.
Here standard error is shown where a cell fails, so that no page needs `2>/dev/null`, which would hide errors.
A cell that is to show an error says `2>&1`.
"""

import atexit
import os
import subprocess
import sys
import tempfile
import warnings

from IPython import get_ipython

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
}
for _name in ("FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE"):  # the kernel sets them: commands would draw spinners
    os.environ.pop(_name, None)
warnings.filterwarnings("ignore", "IProgress not found")  # tqdm, in a notebook without widgets
warnings.filterwarnings("ignore", category=FutureWarning)


def bash(line: str, cell: str) -> None:
    """The cell magic: what its commands print. Where one fails, its standard error too, and it raises."""
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", cell], capture_output=True, text=True, check=False)
    print(done.stdout, end="")
    if done.returncode:
        print(done.stderr, end="", file=sys.stderr)
    done.check_returncode()


get_ipython().register_magic_function(bash, "cell", "bash")
