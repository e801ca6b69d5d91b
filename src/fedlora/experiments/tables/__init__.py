"""Results as tables: of an experiment, and in the pages of docs/evidence, which are filled by nothing else.

cells.py           means of an experiment's cells, and paired differences
prices.py          what each row costs where nobody attacks
budgets.py         what privacy costs
chance.py          what guessing would score
decision_words.py  verdicts in words
filled_pages.py    the filled blocks of a Markdown page
filled_tables.py   the kinds of table that such a block can be
captions.py        what stands above them
"""
