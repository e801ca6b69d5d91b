"""Experiments: a grid of runs from one TOML file, their results as small JSON files, and what they say.

What is asked
    spec.py             what an experiment is: its file
    claims.py           questions with margins, and the paper's claims: docs/claims.toml
    comparison.py       methods on one configuration, as an experiment (`fedlora compare`)
    merger_settings.py  the settings behind the labels of an axis `merged`
    runnable.py         what the configuration alone shows to be impossible

Runs
    plan.py             which runs an experiment is made of
    runner.py           run what is missing
    pool.py             in processes that may die
    mergers.py          train once, merge many
    head_alone.py       the controls without LoRA
    failures.py         runs that failed by themselves, kept as results are

Results as files, not believed but checked
    results.py          one JSON for each finished run, named by its configuration's digest
    checked_results.py  what a result has to be
    stored_json.py      JSON that anybody may have changed
    parts.py            which code on which machine made a run, part by part
    other_files.py      results that are of other data, by name
    left_out.py         results that no table shows, and why

How many seeds: a plan here is of seeds, not of runs as above
    looks.py            the plan as a file, and every look at the results since
    stored_plans.py     what that file has to be
    plan_check.py       its numbers are recomputed
    power.py            what a number of seeds can show, before they are run
    waiting.py          what nobody shows before all planned seeds are there

From results to words
    numbers.py          what runs are compared by, each by name
    digits.py           what differs by round-off is alike
    units.py            numbers in words of a stranger
    chance.py           what guessing would score
    tables.py           cells, means, paired differences
    verdicts.py         better, worse, equivalent or undecided: tests, and one error rate for a family
    decisions.py        from results to verdicts, past the gate
    decision_words.py   verdicts in words
    prices.py           what each row costs where nobody attacks
    budgets.py          what privacy costs
    run_times.py        examples and hours
    provenance.py       what scores rest on: commits, machines, whose model

Pages: tables filled into Markdown of docs/, and results/report.html from the templates in page/
    pages.py            the filled blocks of a Markdown page
    page_tables.py      the kinds of table that such a block can be
    captions.py         what stands above them
    report.py           the HTML page
    sections.py         one experiment on it
    decision_page.py    its part on what is decided
    pictures.py         figures as SVG inside it

Pictures (matplotlib)
    plots.py, interval_plots.py, map_plots.py, budget_plot.py
"""
