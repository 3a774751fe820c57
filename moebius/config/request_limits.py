"""How much one request may ask for; the gateway answers 400 above these, the engine INVALID_ARGUMENT.

Chosen by cost, not by taste: whatever every step does for a request has to stay below a tenth of a
millisecond per output at these numbers.
"""

from __future__ import annotations

# Each entry is 20 bytes that a step copies to the device per output, and one addition there: 80 KiB and
# some tens of microseconds.
MAX_LOGIT_BIAS = 4096
# Compared with a sampled token in one look-up; masked one by one while `min_tokens` holds: 20 KiB a step.
MAX_STOP_TOKEN_IDS = 1024
# 16 bytes each that a step copies to the device per output.
MAX_ALLOWED_TOKEN_IDS = 8192
# Each is two sequences of tokens (at a word's beginning and elsewhere), compared with the output's end in
# every step; the limits are on their number, and on their ids if all were as long as the longest.
MAX_BAD_WORDS = 256
MAX_BAD_WORD_SEQUENCES = 2 * MAX_BAD_WORDS
MAX_BAD_WORD_IDS = 8192
MAX_BAD_WORD_CHARACTERS = 256
# Columns of a gather, and of what comes back to the host.
MAX_LOGPROB_TOKEN_IDS = 128
# Every output searches its new text for each of them in every step.
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_CHARACTERS = 1024
# Outputs of one request.
MAX_OUTPUTS = 128
# Alternatives per token.
MAX_LOGPROBS = 20
# Of a schema, an expression or a grammar that the output has to follow: compiling as much takes some tens of
# milliseconds, and the engine keeps the latest ones.
MAX_GRAMMAR_CHARACTERS = 2**18
# For how long a prefix outlives those of other requests in the cache, seconds: a day, the longest that
# OpenAI's API offers.
MAX_KEEP_PREFIX_S = 86_400
# Texts of which an output has to be one.
MAX_CHOICES = 4096
# Of each sequence that begins or ends a thought, or that is forced at its end: a sentence and a marker.
MAX_THOUGHT_MARKER_IDS = 256
