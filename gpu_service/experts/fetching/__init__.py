"""Experts that a decode step needs and the GPU lacks: copied over the link while servers compute others."""
