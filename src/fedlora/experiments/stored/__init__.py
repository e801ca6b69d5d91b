"""What lies under results/: one JSON for each finished run, failures and plans, checked where they are read.

results.py           one JSON for each finished run, named by its configuration's digest
checked_results.py   what a result has to be
stored_json.py       JSON that anybody may have changed
parts.py             which code on which machine made a run, part by part
failures.py          runs that failed by themselves, kept as results are
stored_seed_plan.py  what the file of a plan has to be
"""
