"""What every part of the engine knows: requests, the records of a step, messages, this rank's place."""
