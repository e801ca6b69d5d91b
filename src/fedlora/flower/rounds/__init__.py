"""The rounds at the server: whom it asks, each answer's fate, measurements and records.

The path of an upload, from Flower's reply to the new state; each check is made in only one of these files:

rounds/strategy.py         asks, waits until the deadline, writes down and stores; hooks.py: what private rounds change
rounds/questions.py        what each client is sent, and the most that it may reply
rounds/collecting.py       its sender: the answered message, its node, its round's group; one answer each
rounds/bounded_pull.py     its size, before it is in memory
rounds/attempt.py          each asked client's fate, and what it does to the client (`EFFECTS`); the loss
messages/codecs.py         fedlora's own clients, or stock PEFT ones
messages/records.py        its header (protocol, facts, run, round, form), and the shapes and types of its bytes
../server/intake.py        what counts: one upload of each client, examples, quorum
../server/checks.py        the adapter: modules, factors, ranks, heads, finite numbers
../server/kept_uploads.py  the close: cancelling terms, the robust rule, weights and caps
../core/method.py          the method's next state, module by module
rounds/round_lines.py      the round's line, before the checkpoint; rounds/events.py its events
rounds/recording.py        the stored round: the server's scores, the best state, trackers, early stopping

Only names and shapes are checked twice: `records` needs them to read bytes, and `checks` also serves Python users.

Numbers, the same everywhere here: rounds, and the attempts at one, count from 1. A state, a strategy and a `Progress`
have the `round` that was finished last (0: none); events, lines, attempts and receipts have the `round` that they tell
of. `FlowerState.next_round` is the round that is played from a state. `rounds` is how many. `nth` is an attempt's
number; events and lines call it `attempt`.
"""
