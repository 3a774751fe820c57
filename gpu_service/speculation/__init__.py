"""Speculative decoding: several tokens of a request from one step, the same ones as without it.

A drafter proposes the next k tokens of a request. The next step then has 1 + k rows of that request instead
of one: the last known token, and each draft at the position after the one before. Row i says, with the
uniform number of its own output position (docs/decisions/0004), which token follows its own; as long as that
is the next draft, the draft is accepted. So a step adds 1 to 1 + k tokens, and outputs are those of decoding
one by one at every temperature: a draft only ever anticipates what is sampled anyway.

step N       | t5 -> 17 | d6=17 -> 4 | d7=9 -> 30 |      rows; the token that each of them samples
commit N       17, 4 appended (d6 accepted, d7 rejected); the KV of t5 and d6 stands, d7's is written over
step N+1     | t7=4 -> .. | ...

**A verified position is a decode row** (`rows.py`). The scheduler's `Batch` has one entry for each request
and its drafts beside it; the input builder makes rows of them, each with the request's pages, its own
position, KV length and sampling parameters. All of a layer's KV is written before its attention, so every
row sees the drafts before it. Kernels, captured graphs, ranks and expert servers see a decode step of more
requests, and need to know nothing.

**Only where every request decodes**, and whose last token the host knows. While a step with drafts is in
flight no other is planned in its lane: how far its requests come is unknown, and a step of the others alone
would cost about as much as one of all. Other steps overlap as ever. Prompts go first: drafts never take a
row, a page or budget that a request's own token needs.

**Drafters** (`drafter.py`). A host drafter looks at known tokens (`ngram.py`). A device drafter, the model's
MTP layers (`mtp.py`) or a smaller model (`draft_model.py`), is called by the model runner in every step once
its tokens are sampled; its drafts come back with them, `StepOutputs.drafts`, and are the request's for the
next step. It may fail with ExpertUnavailable: then there are none.

With both (`ngram+mtp`, `ngram+draft_model`) each request's step verifies the drafts of the one that is
accepted more often.

**How many are worth it** (`policy.py`) follows from how often drafts are accepted, by place and request
(`acceptance.py`), and from what steps take: the first rank measures that (`pace.py`), counts how many
distinct experts rows of one request and of several choose (`overlap.py`), fits what these cost where they are
(`step_costs.py`), and sends it to all ranks at one place. A device drafter itself is left out of steps where
its drafts do not pay (`rest.py`). All else is decided from tokens alone, so that ranks decide alike.

What a row samples may depend on the drafts before it other than through the model: penalties count them
(`PenaltyRows.preceding_drafts`), and a constraint's mask is that of a copy which has accepted them
(`engine/token_masks.py`). A row after a draft that turns out wrong counts for nothing, there as well. Models
that keep a state for each request keep one for each row of a step with drafts (`core/depths.py`), and go on
with that after the last draft that was right.
"""
