"""Results as tables: of an experiment, and in the pages of docs/evidence, which are filled by nothing else."""
