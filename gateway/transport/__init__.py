"""HTTP apart from any model: connections, TLS, event streams, and which requests are admitted."""
