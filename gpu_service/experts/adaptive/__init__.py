"""Which experts are in a GPU's slots follows what requests choose, while they are served.

`counts.py` counts on the device, `forecast.py` says what the next tokens will choose, `policy.py` which
exchanges are worth their copies, `exchange.py` carries them out between steps, `placement.py` does one
after the other. docs/placement.md says what is measured and when an exchange is worth it.
"""
