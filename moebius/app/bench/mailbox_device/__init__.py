"""`moebius bench mailbox --device cuda`: the hand-off of a GPU's MoE layers, inside a captured graph."""
