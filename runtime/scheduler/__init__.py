"""Many replies at once over one step session.

job.py      one reply in progress, and what its owner hears of it
slots.py    which job lives in which slot; live slots stay at the front
cache.py    committed states of earlier conversations, by the tokens they hold
scheduler.py  the loop: admit → plan → step → accept, on one thread that owns the session
"""
