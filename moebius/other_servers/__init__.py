"""Tables of the names that other servers have for settings; `moebius/other_names.py` looks them up."""
