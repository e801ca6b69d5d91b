"""What an experiment is: one TOML file, the runs that it makes, and what they cost."""
