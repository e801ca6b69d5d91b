"""A site: its node, the trainer that stays in memory, and the checks of its folder."""
