"""Values that other servers have for our settings."""

from __future__ import annotations

# By setting, theirs in lower case to ours.
OTHER_VALUES: dict[str, dict[str, str]] = {
    "max_model_len": {"auto": "none", "-1": "none"},
    "dtype": {
        "bf16": "bfloat16",
        "fp32": "float32",
        "float": "float32",
        "fp16": "float16",
        "half": "float16",
    },
    "kv_cache_dtype": {
        **dict.fromkeys(("fp8", "fp8_ds_mla"), "fp8_e4m3"),
        **dict.fromkeys(("bf16", "bfloat16"), "auto"),
    },
    "device": {"gpu": "cuda"},
    "expert_dtype": {"bf16": "bfloat16", "fp32": "float32"},
    "attention_backend": {
        **dict.fromkeys(("flashinfer", "flashinfer_mla"), "flashinfer"),
        **dict.fromkeys(("triton", "triton_attn", "triton_mla"), "triton"),
        **dict.fromkeys(("torch_native", "torch_sdpa"), "torch"),
    },
    "log_level": {"warn": "warning", "critical": "error", "trace": "debug"},
}
