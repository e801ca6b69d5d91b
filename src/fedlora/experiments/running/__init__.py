"""Runs what is missing: in processes that may die, with mergers of one training, and comparisons of methods.

runner.py      run what is missing
pool.py        in processes that may die
mergers.py     train once, merge many
head_alone.py  the controls without LoRA
comparison.py  methods on one configuration, as an experiment (`fedlora compare`)
"""
