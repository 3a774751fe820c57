"""Vision towers: transformers' own modules behind one interface; a registry says which family has which."""
