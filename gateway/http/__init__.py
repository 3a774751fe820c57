"""What HTTP needs without a model: connections, TLS, event streams, and which requests are admitted."""
