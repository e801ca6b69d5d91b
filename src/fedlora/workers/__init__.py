"""Runs a round's local work in several processes, on all cores of a machine or all its GPUs.

processes.py  processes that each hold a copy of one object, and work on it      pool.py  a trainer in such processes
"""

from typing import TYPE_CHECKING

from fedlora._lazy import face

if TYPE_CHECKING:
    from fedlora.workers.pool import Pool
    from fedlora.workers.processes import Processes

__getattr__ = face("fedlora.workers", {"pool": ("Pool",), "processes": ("Processes",)})

__all__ = ["Pool", "Processes"]
