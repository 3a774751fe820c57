"""Grammars that an output has to follow, as llguidance compiles them: for the gateway and for the engine."""
