"""What travels, as Flower's records, checked before it is used."""
