"""What a device's memory is planned for, and what it really holds: the ledger.

Order at start: `plan_memory` (refuses what can not fit) · load weights · `profile_activations` ·
`size_kv_pool` · KV cache · graphs · `MemoryLedger.seal`. After that nothing is allocated any more.
"""

from gpu_service.memory.device_memory import DeviceMemory, MemoryUse, make_device_memory
from gpu_service.memory.kv_pool import size_kv_pool
from gpu_service.memory.ledger import MemoryLedger
from gpu_service.memory.plan import MemoryLine, MemoryPlan, plan_memory
from gpu_service.memory.profile import profile_activations

__all__ = [
    "DeviceMemory",
    "MemoryLedger",
    "MemoryLine",
    "MemoryPlan",
    "MemoryUse",
    "make_device_memory",
    "plan_memory",
    "profile_activations",
    "size_kv_pool",
]
