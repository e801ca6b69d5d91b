"""A site: its folder, its node, its trainer."""
