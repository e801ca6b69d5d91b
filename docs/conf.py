"""How the site is built: `make docs`. Nothing is fetched from a network, and a warning is an error."""

import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # cells call `fedlora`
os.environ.update(HF_HUB_OFFLINE="1", FLWR_TELEMETRY_ENABLED="0", FLWR_DISABLE_UPDATE_CHECK="1")  # no network

import fedlora  # noqa: E402
from generate import write_python  # noqa: E402
from generate.docstrings import as_rst, short_signature  # noqa: E402

write_python(HERE / "reference" / "python")  # signatures and docstrings; the other pages of reference/ are committed

project = "fedlora"
author = "the fedlora authors"
version = release = fedlora.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["generate"]

myst_enable_extensions = ["deflist"]
myst_heading_anchors = 4  # as on a code host, so that a link works in both places
nitpicky = True
# Links inside docstrings are a convenience: `x` there is code, and becomes a link where the name is documented.
nitpick_ignore_regex = [("py:.*", ".*")]
smartquotes = False  # quotes are of values, and -- is of options
highlight_language = "none"
default_role = "py:obj"

# Cells run at every build, for the library may have changed under them. FEDLORA_DOCS_EXECUTE=off skips them.
nb_execution_mode = os.environ.get("FEDLORA_DOCS_EXECUTE", "force")
# Without a kernel every cell counts as Python, also one of bash.
suppress_warnings = ["misc.highlighting_failure"] if nb_execution_mode == "off" else []
nb_execution_timeout = 600
nb_execution_raise_on_error = True
nb_merge_streams = True

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = "fedlora"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False


def spread(app, env, docnames):
    """Pages whose cells run take minutes: apart from each other, so that processes of `-j` divide them."""
    slow = [name for name in docnames if "{code-cell}" in Path(env.doc2path(name)).read_text()]
    fast = [name for name in docnames if name not in slow]
    each = -(-len(fast) // max(1, len(slow)))
    docnames[:] = [name for k in range(len(slow)) for name in (slow[k], *fast[k * each : (k + 1) * each])] or fast


def setup(app):
    app.connect("env-before-read-docs", spread)
    app.connect("autodoc-process-docstring", as_rst, priority=400)  # before napoleon
    app.connect("autodoc-process-signature", short_signature)
