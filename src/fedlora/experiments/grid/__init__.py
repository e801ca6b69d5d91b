"""What an experiment is: one TOML file, the runs that it makes, and what they cost.

spec.py             what an experiment is: its file
merger_settings.py  the settings behind the labels of an axis `merged`
plan.py             which runs an experiment is made of
runnable.py         what the configuration alone shows to be impossible
run_times.py        examples and hours
other_files.py      results that are of other data, by name
left_out.py         results that no table shows, and why
"""
