"""Drills: faults injected into a served checkpoint, and what has to hold in spite of them.

`python -m tests.drills --help`; `docs/reliability.md` has the results. Not collected by pytest: they take
minutes, and each judges a running system rather than a unit.
"""
