"""`moebius bench replay`: placement strategies compared on the same routing, by simulation."""
