"""Runs a round's local work in several processes, on all cores of a machine or all its GPUs.

processes.py  processes that each hold a copy of one object, and work on it      pool.py  a trainer in such processes
"""

from fedlora.workers.pool import Pool
from fedlora.workers.processes import Processes

__all__ = ["Pool", "Processes"]
