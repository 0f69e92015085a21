"""Chaos: a whole system on a real cluster, faults at random and requests all the time, and at the end an audit that nothing is wrong,
lost or left behind. `make chaos` (docs/chaos.md).

schedule.py says what happens when (pure, from a seed); faults.py does it; traffic.py asks and judges; blame.py tells which request may
fail; audit.py looks at what is left; run.py plays all of it.
"""
