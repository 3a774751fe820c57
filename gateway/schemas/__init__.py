"""Request bodies. A field is implemented, or refused by name; nothing is dropped in silence."""
