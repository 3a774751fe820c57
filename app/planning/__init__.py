"""What a model will take and how fast it will be on given hardware, before anything of it is loaded.

Reads `config.json` and headers of weights, never weights. Formulas are in `docs/plan.md`; what the engine and
the expert servers compute themselves is asked of them, not computed again.
"""
