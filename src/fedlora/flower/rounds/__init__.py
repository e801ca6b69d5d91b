"""The rounds at the server: who is asked, what becomes of each answer, what is measured and kept.

An upload's way, from Flower's reply to the new state; what each file looks at, no other looks at again:

rounds/strategy.py         asks, waits until the deadline, writes down and stores
rounds/collecting.py       whose answer it is: the message answered, its node, its round's group; one of each
rounds/bounded_pull.py     how large it is, before it is in memory
rounds/attempt.py          the fate of who was asked; the loss
messages/codecs.py         fedlora's own clients, or stock PEFT ones
messages/records.py        what it says it is (protocol, facts, run, round, form), and the shapes and types of its bytes
../server/intake.py        who counts: one upload of each client, examples, quorum
../server/checks.py        the adapter: modules, factors, ranks, heads, finite numbers
../server/kept_uploads.py  the close: cancelling terms, the robust rule, weights and caps
../core/method.py          the method's next state, module by module
rounds/round_lines.py      the round's line, before the checkpoint; rounds/events.py what is told
rounds/recording.py        the stored round: the server's scores, the best state, trackers, whether it is enough

Names and shapes alone are seen by two: `records` needs them to read bytes, and `checks` serves Python users, too.
"""
