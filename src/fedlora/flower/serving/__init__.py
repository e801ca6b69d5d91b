"""The server's processes: SuperLink and rounds kept going, and how they are."""
