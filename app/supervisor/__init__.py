"""Plans, starts, watches, restarts and stops the processes of `moebius serve`."""
