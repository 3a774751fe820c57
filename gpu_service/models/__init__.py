"""Models composed from layers, by the switches of a `ModelConfig`; no family has code of its own here."""
