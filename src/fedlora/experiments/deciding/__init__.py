"""From results to verdicts: what is asked, the plan, the one look, the gate, and one error rate for a family.

claims.py           questions with margins, and the paper's claims: docs/claims.toml
seed_plan.py        how many seeds, as a file, and every look at the results since
seed_plan_check.py  its numbers are recomputed
power.py            what a number of seeds can show, before they are run
waiting.py          what nobody shows before all planned seeds are there
verdicts.py         better, worse, equivalent or undecided: tests, and one error rate for a family
decisions.py        from results to verdicts, past the gate
provenance.py       what scores rest on: commits, machines, whose model
"""
