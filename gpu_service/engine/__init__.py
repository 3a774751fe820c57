"""Steps: launch, sample, commit; the loops around them."""
