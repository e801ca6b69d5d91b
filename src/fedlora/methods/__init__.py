"""The methods, one paper per file; files with a leading underscore hold what several methods share.

`METHODS` lists them all and `build` makes one by name. A method knows no server and no transport, and
of the others only FedIT's mean of factors.
"""

from fedlora.methods.registry import METHODS, build

__all__ = ["METHODS", "build"]
