"""Messages as Flower's records, checked before use."""
