"""What a device's memory is planned for, and what it really holds: the ledger.

Order at start: `plan_memory` (refuses what cannot fit) · load weights · `profile_activations` ·
`size_kv_pool` · KV cache · graphs · `MemoryLedger.seal`. After that nothing is allocated any more.
"""
