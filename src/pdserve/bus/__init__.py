"""The bus: messages between processes over Redis streams, and who is alive.

keys.py       every key's name
client.py     connections: no call is unbounded, repeated or answered with another's reply
memory.py     a server inside this process, for tests
liveness.py   pure: is the server the one we knew, for how long, how long was a reader deaf
outbox.py     pure: the bounded queue of what is to be sent
tamper.py     test hooks on the way out
bus.py        one per process: the writer and the watch over the server
reader.py     one per stream that a process reads
absence.py    pure: when a missing registration counts
registry.py   registrations: write one's own, watch all
"""
