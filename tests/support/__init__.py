"""What several test files need: inputs, builders, oracles. Nothing in here is a test."""
