"""What server and sites agree on: settings, facts, names."""
