"""Differential privacy of what a federation releases. The unit is one client; the server is trusted.

`mechanism` clips, rounds, sums and noises; `geometry` says in which space; `accounting` what it costs; `ledger` keeps
what was spent on a population of clients; `journal` makes each noised sum leave at most once; `released` lists what may
leave at all; `sampling` draws who takes part. None of it knows a method, a server or a network.
"""
