"""Environment variables of vLLM, SGLang, llama.cpp, ollama and LvLLM, and those that libraries read."""

from __future__ import annotations

from moebius.other_servers.name import KEEP_ALIVE, SEVERAL_MODELS, OtherName, fulfilled, refused, same

# Of libraries that compute here as there, or of the system: they stay where they are.
LIBRARIES = (
    *(
        "CUDA_",
        "NCCL_",
        "HF_",
        "HUGGING",
        "TORCH",
        "PYTORCH_",
        "TRITON_",
        "FLASHINFER_",
        "CUBLAS",
        "OMP_",
        "MKL_",
    ),
    *(
        "LD_",
        "PATH",
        "PYTHON",
        "HOME",
        "TMP",
        "XDG_",
        "HTTP",
        "NO_PROXY",
        "NVIDIA_",
        "GLOO_",
        "UCX_",
        "TOKENIZERS_",
    ),
    *("SAFETENSORS_", "TRANSFORMERS_", "TVM_", "CUTE_", "CUTLASS_", "MALLOC_", "KMP_", "GOMP_"),
)
# Of the servers whose names are known here.
PREFIXES = ("VLLM_", "SGLANG_", "SGL_", "LVLLM_", "LK_", "LLAMA_", "GGML_", "OLLAMA_", "KT_")
# What OpenTelemetry's variables are set for; the settings of all processes come from one place.
OPENTELEMETRY = {
    "OTEL_EXPORTER_OTLP_ENDPOINT": "otlp_endpoint",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "otlp_endpoint",
    "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "otlp_endpoint",
    "OTEL_METRIC_EXPORT_INTERVAL": "otlp_metrics_interval_s",
    "OTEL_TRACES_SAMPLER_ARG": "trace_sample_ratio",
}
_KERNELS = "kernels are chosen by GPU and sizes (--attention-backend, --small-all-reduce)"
# LLAMA_ARG_… are llama-server's options, of some with another name.
LLAMA_ARGUMENTS = {
    "n-parallel": "parallel",
    "endpoint-metrics": "metrics",
    "endpoint-props": "props",
    "endpoint-slots": "slots",
    "log-verbosity": "log-verbosity",
    "think": "reasoning-format",
    "n-gpu-layers-draft": "ngld",
}

TABLE: dict[str, OtherName] = {
    # vLLM
    "vllm-api-key": same("api_key"),
    "vllm-attention-backend": same("attention_backend"),
    "vllm-logging-level": same("log_level", DEBUG="debug", INFO="info", WARNING="warning", ERROR="error"),
    "vllm-cpu-kvcache-space": same("kv_cache_gib"),
    "vllm-use-v1 vllm-worker-multiproc-method vllm-host-ip vllm-loopback-ip vllm-port": fulfilled(
        "processes are started and found by the supervisor", takes_value=True
    ),
    "vllm-sleep-when-idle": fulfilled("processes sleep when there is nothing to compute", takes_value=True),
    "vllm-allow-long-max-model-len": refused("the longest is the checkpoint's; else edit its config.json"),
    "vllm-use-modelscope sglang-use-modelscope": refused("models are of the Hugging Face hub, or a path"),
    "vllm-use-deep-gemm vllm-use-flashinfer-moe-fp4 vllm-use-flashinfer-moe-fp8": refused(_KERNELS),
    "vllm-use-flashinfer-sampler vllm-flashinfer-moe-backend vllm-nvfp4-gemm-backend": refused(_KERNELS),
    "vllm-test-force-fp8-marlin vllm-marlin-use-atomic-add vllm-marlin-input-dtype": refused(_KERNELS),
    "vllm-enable-pcie-allreduce": OtherName("small_all_reduce", {"1": "one-shot", "0": "nccl"}),
    "vllm-log-stats-interval vllm-memory-profiler-estimate-cudagraphs": fulfilled(
        "figures are at /metrics, memory is planned", takes_value=True
    ),
    "vllm-cpu-omp-threads-bind vllm-cpu-num-of-reserved-cpu": refused(
        "threads are pinned by NUMA node (--expert-threads, --numa-node)"
    ),
    "vllm-no-usage-stats vllm-do-not-track": fulfilled("nothing is reported to anyone", takes_value=True),
    "vllm-logging-config-path vllm-configure-logging": refused("here --log-level and --log-format", idle="1"),
    # SGLang
    "sglang-enable-jit-deepgemm sglang-enable-deep-gemm sgl-enable-jit-deepgemm": refused(_KERNELS),
    "sglang-disable-deep-gemm sglang-disable-cudnn-check": fulfilled(
        "there is no such kernel here", takes_value=True
    ),
    "sgl-disable-tp-memory-inbalance-check sglang-disable-tp-memory-inbalance-check": fulfilled(
        "each GPU's free memory is planned by itself", takes_value=True
    ),
    "sglang-enable-spec-v2": fulfilled(
        "a step with draft tokens never overlaps with the next one", takes_value=True
    ),
    "sglang-allow-overwrite-longer-context-len": refused(
        "the longest is the checkpoint's; else edit its config.json"
    ),
    "sglang-mamba-conv-dtype sglang-mamba-ssm-dtype": refused("states are kept as the family needs them"),
    # llama.cpp
    "llama-api-key": same("api_key"),
    "ggml-cuda-enable-unified-memory": refused("experts that have no room on the GPU are in RAM"),
    # ollama
    "ollama-host": OtherName("host", unit="address"),
    "ollama-context-length": same("max_model_len"),
    "ollama-num-parallel": same("max_num_seqs"),
    "ollama-max-queue": same("max_waiting_requests"),
    "ollama-origins": same("cors_origins"),
    "ollama-kv-cache-type": OtherName(
        "kv_cache_dtype",
        {"f16": "auto", "q8_0": "fp8_e4m3", "q4_0": "!keys and values have 8 bits at least"},
    ),
    "ollama-debug": OtherName("log_level", {"1": "debug", "true": "debug", "0": "info", "false": "info"}),
    "ollama-flash-attention": fulfilled("attention is always of that kind", takes_value=True),
    "ollama-keep-alive": KEEP_ALIVE,
    "ollama-max-loaded-models": refused(SEVERAL_MODELS, idle="1"),
    "ollama-sched-spread": fulfilled("GPUs share every layer (--tensor-parallel-size)", takes_value=True),
    "ollama-models": refused("give a path, owner/name or owner/name:Q4_K_M as MODEL"),
    "ollama-load-timeout": refused("here --ready-timeout-s"),
    "ollama-gpu-overhead": refused("the share of GPU memory: --gpu-memory-utilization"),
    "ollama-llm-library": refused("--device takes cpu or cuda"),
    "ollama-nohistory ollama-noprune ollama-no-cloud": fulfilled("it is so here", takes_value=True),
}
