"""The rounds at the server: whom it asks, each answer's fate, measurements and records.

The path of an upload, from Flower's reply to the new state:

rounds/strategy.py         asks, waits until the deadline, writes down and stores; hooks.py: what private rounds change
rounds/membership.py       who is drawn, and how many a round needs
rounds/questions.py        what each client is sent, and the most that it may reply
rounds/collecting.py       its sender: the answered message, its node, its round's group
rounds/bounded_pull.py     its size, before it is in memory (arrivals.py: on a grid that is no SuperLink's, afterwards)
rounds/attempt.py          each asked client's fate, and what it does to the client (`EFFECTS`); the loss
messages/codecs.py         fedlora's own clients, or stock PEFT ones
messages/records.py        its header (protocol, facts, run, round, form), and the shapes and types of its bytes
../server/rounds.py        what counts: one upload of each client, examples, quorum; the close
../server/checks.py        the adapter: modules, factors, ranks, heads, finite numbers (cancelling.py: its terms)
../server/kept.py          weights, and the robust rule's coefficients (streamed.py: adding up; private.py: noise)
../core/method.py          the method's next state, module by module
rounds/round_lines.py      the round's line, before the checkpoint; rounds/events.py its events
rounds/recording.py        the stored round: the server's scores, the best state, trackers, early stopping

`server` checks what any caller gives it, from Python too; so `records` and `checks` both look at names and shapes.

Numbers: rounds, and the attempts at one, count from 1. A state, a strategy, a `Progress`, and the messages to and from
clients have the `round` that was finished last (0: none), and so has the event `Ended`; other events, lines and
attempts have the `round` that they tell of. `FlowerState.next_round` is the round that is played from a state. `rounds`
is how many. `nth` is an attempt's number; events and lines call it `attempt`.
"""
