"""A federation's server: make its folder, change its members, check it, and play its rounds."""
