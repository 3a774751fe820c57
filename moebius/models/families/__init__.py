"""A module per family; each has a tuple `FAMILIES` of what it describes."""
