"""Names that KTransformers with SGLang, and LvLLM, have for settings of experts on CPU sockets."""

from __future__ import annotations

from moebius.other_servers.name import OtherName, flag, fulfilled, refused, same

_METHODS = {
    "AMXINT4": "int4",
    "AMXINT8": "int8",
    **dict.fromkeys(("BF16", "FP8", "FP8_PERCHANNEL", "RAWINT4", "GPTQ_INT4", "MXFP4", "MXFP8"), "keep"),
    **dict.fromkeys(("LLAMAFILE", "MOE_INT4", "NVFP4"), "keep"),
}
_STATISTICS = "here --expert-statistics, a file that `moebius experts record import` makes of a .pt file"

TABLE: dict[str, OtherName] = {
    "kt-cpuinfer cpu-threads": OtherName("expert_threads", unit="threads"),
    "kt-threadpool-count numa-nodes": same("expert_servers"),
    "kt-numa-nodes": refused("expert servers are pinned to their NUMA nodes (--expert-servers)", many=True),
    "kt-num-gpu-experts": same("gpu_experts"),
    "kt-gpu-experts-ratio": same("gpu_experts_ratio"),
    "kt-expert-placement-strategy": OtherName("placement_strategy", yields=True),
    "kt-enable-dynamic-expert-update": flag("placement_strategy", "adaptive"),
    "kt-gpu-prefill-token-threshold": same("stream_min_rows"),
    "kt-method kt-amx-method": OtherName("expert_dtype", _METHODS),
    "kt-weight-path kt-amx-weight-path": OtherName("expert_checkpoint", unit="checkpoint"),
    "kt-max-deferred-experts-per-token": same("defer_experts"),
    "kt-skip-gpu-expert-cpu-copy": flag("drop_resident", "drop"),
    "record-kt-gpu-expert-distribution": OtherName(
        "expert_recorder", fixed="stat", takes_value=False, yields=True
    ),
    "init-expert-location": refused(_STATISTICS, idle="trivial"),
    # LvLLM; its variables in lower case are keys of its configuration file
    "lk-threads": OtherName("expert_threads", unit="threads"),
    "lk-thread-binding": OtherName(
        fulfilled="threads are pinned to the cores of their NUMA node",
        values={"NUMA_NODE": "!threads are pinned to single cores of their NUMA node"},
    ),
    "lk-power-saving": fulfilled("threads sleep when there is nothing to compute", takes_value=True),
    "lk-numa-huge": fulfilled("packed experts take 2 MiB pages where there are any", takes_value=True),
    "lvllm-moe-numa-enabled": OtherName(
        fulfilled="experts are on the CPU sockets where the GPU has no room for them",
        values={"0": "@gpu_experts_ratio=1"},
    ),
    "lvllm-moe-use-weight": OtherName(
        "expert_dtype", {"TO_DTYPE": "bfloat16", "KEEP": "keep", "INT4": "int4", "INT8": "int8"}
    ),
    "lvllm-moe-quant-on-gpu": refused("experts are requantised on the CPUs that keep them"),
    "lvllm-gpu-resident-moe-layers": same("gpu_layers"),
    "lvllm-gpu-resident-moe-experts": same("gpu_experts"),
    "lvllm-gpu-prefill-min-batch-size": OtherName("stream_min_rows", {"0": "@prefill_experts=cpu"}),
    "lvllm-gpu-prefetch-window": fulfilled("copies run ahead as far as the ring allows", takes_value=True),
    "lvllm-enable-numa-interleave": fulfilled(
        "every server's share lies on its own NUMA node", takes_value=True
    ),
    "lvllm-enable-moe-layerwise-load": fulfilled("experts are packed layer by layer", takes_value=True),
}
