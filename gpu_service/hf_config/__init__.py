"""config.json of each family, read into a `ModelConfig`."""
