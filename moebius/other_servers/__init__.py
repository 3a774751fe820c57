"""Tables of the names that other servers have for settings; `setting_names.py` looks them up."""
