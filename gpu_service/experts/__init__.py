"""How MoE layers reach the routed experts: submit, and collect later."""
