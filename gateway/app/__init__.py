"""The HTTP application: its state, its routes, the run of a request, and the server around it."""
