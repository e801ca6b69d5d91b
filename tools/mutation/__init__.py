"""How much the tests are worth: which of some 400 small changes of the code they find. `make mutants`.

All changes are compiled into the program at once, each behind a switch (`switch.py`), so that one process that has
imported and collected everything can try one after the other in forks of itself. Decision 0021 says why this is no tool
of the field.
"""
