"""`moebius bench gateway`: what the HTTP process costs, in front of an engine that costs next to nothing.

The engine is scripted and comes with the bench, so that everybody who has Moebius can measure: tokens of a
table, one per stream and step, at the pace that is asked for. The limit is measured in the same run: the
same bytes at the same pace from a bare ASGI application of the same HTTP server, which knows no engine,
no prompt and no text.
"""
