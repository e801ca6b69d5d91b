"""What server and sites agree on: settings, policy, facts, privacy, the files that travel by hand, certificates."""

from typing import Literal

PROTOCOL = "fedlora/7"  # of the messages; both sides refuse another one by name
HeldOut = Literal["validation", "test"]
HELD_OUT: tuple[HeldOut, ...] = ("validation", "test")
