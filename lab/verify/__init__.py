"""`moebius verify`: what the chosen formats cost, layer by layer and in next-token distributions.

Two models run side by side over the same text, a few layers at a time: the reference (the checkpoint's
experts dequantised, or another checkpoint), and ours (experts packed as expert servers pack them, or
resident). Never is more than one pipeline stage of dense weights and one layer of experts in memory.
"""
