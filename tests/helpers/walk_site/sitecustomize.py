"""Every Python process that `tests.helpers.traced_walk` starts begins here, as this folder is on its path."""

from tests.helpers.traced_walk import trace_this_process

trace_this_process()
