"""The numbers that runs are compared by: their names, their digits, their units."""
