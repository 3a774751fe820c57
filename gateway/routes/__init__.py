"""HTTP routes: thin; they validate, build engine requests and hand over to `serving.py`."""
