"""What the gateway's processes have in common: counts that they share."""
