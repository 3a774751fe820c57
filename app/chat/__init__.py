"""`moebius chat`: the conversation and its commands, answers as they stream, and the terminal."""
