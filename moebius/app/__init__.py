"""The top layer: command line, supervisor, planner, benches and demo. It may import every service; nothing
else imports it."""
