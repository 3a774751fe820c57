"""Every Python process that tests start with `--tls` begins here, as this folder is on its path."""

import importlib.util
import os

# Other environments, as that of the clients, lack what our settings are made of.
if all(importlib.util.find_spec(name) for name in ("moebius", "pydantic")):
    from tests.helpers.tls_everywhere import VARIABLE, change_defaults

    change_defaults(os.environ[VARIABLE])
