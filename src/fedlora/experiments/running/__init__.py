"""Runs what is missing: in processes that may die, with mergers of one training, and comparisons of methods."""
