"""What server and sites agree on: settings, policy, facts, privacy, the files that travel by hand, certificates."""
