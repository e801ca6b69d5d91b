"""Experiments: a grid of runs from one TOML file, their results a line each, and what they say.

Each file uses those above it, and none below (a contract of import-linter):

digits.py           how numbers are told apart and written
scores.py           the numbers that runs are compared by: names, units, words
result.py           what a finished run left
origin.py           which code on which machine made it
store.py            results on disk: a file an experiment, a line a run
merger_settings.py  the settings behind the labels of an axis `merged`
spec.py             what an experiment is: its file
plan.py             which runs that makes, and what is known of them before they start
costs.py            examples and hours
pool.py             processes that may die
head_alone.py       the controls without LoRA
mergers.py          train once, merge many
runner.py           run what is missing
comparison.py       methods on one configuration, as an experiment of one axis (`fedlora compare`)
verdicts.py         better, worse, equivalent or undecided; what a number of seeds can show
claims.py           questions with margins, and the paper's claims: docs/claims.toml
footnotes.py        what scores rest on: commits, machines, whose model
decisions.py        from results to verdicts, past the gate
seed_plan.py        how many seeds, as a file
tables.py           frames, means of cells, paired differences, prices, budgets
decision_words.py   verdicts in words
page_tables.py      the kinds of table of a Markdown page
filled_pages.py     such a page, filled from results
pictures.py         all pictures, in one style
report.py           one self-contained page, from page.html
"""
