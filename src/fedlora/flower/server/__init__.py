"""A federation's server: its rounds, what it stores of them, and what comes of them."""
