"""What is known of this host: processors, memory, and what was measured on it."""
