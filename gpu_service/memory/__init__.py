"""What a device's memory is planned for, and what it really holds."""
