"""What lies under results/: one JSON for each finished run, failures and plans, checked where they are read."""
