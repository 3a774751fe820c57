"""The roof: command line, supervisor and planner. It may import every service; only `moebius/__main__.py` and
`lab` import it."""
