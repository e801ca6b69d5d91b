"""The server's processes: they keep SuperLink and rounds running, and report on them."""
