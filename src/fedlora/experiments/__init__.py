"""Experiments: a grid of runs from one TOML file, one line of results each, and what the results show.

Each file uses those above it, and none below (a contract of import-linter):

digits.py           how numbers are told apart and written
scores.py           the numbers that runs are compared by: names, units, words
result.py           what a finished run left
leases.py           which process of which machine has a run
store.py            results on disk: a file an experiment, a line a run
spec.py             what an experiment is: its file
spec_checks.py      what is wrong with the file itself
plan.py             a run of it: configuration, identity
grid.py             an experiment at a profile with its results: its runs, what a search chose
runnable.py         what is known of runs before they start
traffic.py          bytes, from ranks and shapes
gpus.py             GPUs dealt to processes
slurm.py            an array script
costs.py            examples, tokens, answers, memory
pool.py             slots for runs: processes that may die
ray_tasks.py        slots on a Ray cluster
places.py           where runs, results and failures are
checks.py           what is wrong with runs, in one list, before the first starts
measured.py         how long a run takes, from a few steps here
runner.py           run what is missing
comparison.py       methods on one configuration, as an experiment of one axis (`fedlora compare`)
frames.py           results as pandas frames (`fedlora.results`)
tables.py           means of cells, paired differences, places
lost.py             what is not in the tables, and why
footnotes.py        what scores rest on: commits, machines, whose model
table_forms.py      a table, and its text as Markdown and LaTeX
printed.py          the paper's tables as printed, with our numbers
method_tables.py    methods side by side: places, costs, rounds to a target, clients, categories
page_tables.py      all tables of an experiment
picture_style.py    the one style of pictures
curve_pictures.py   a score by round
dot_pictures.py     differences with intervals
number_pictures.py  scores by an axis of numbers
category_pictures.py  scores by category of tasks
pictures.py         which of them an experiment has
"""
