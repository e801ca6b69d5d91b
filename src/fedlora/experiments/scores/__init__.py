"""The numbers that runs are compared by: their names, their digits, their units.

numbers.py  what runs are compared by, each by name
digits.py   what differs by round-off is alike
units.py    numbers in words of a stranger
"""
