"""Names that vLLM and SGLang have for settings of the API, of requests and of logs."""

from __future__ import annotations

from moebius.other_servers.name import OtherName, flag, fulfilled, refused, same

_NO_REQUEST_LOG = "requests are traced, not logged: --otlp-endpoint"
_FOREIGN_CODE = "no code of yours is loaded into the server"

TABLE: dict[str, OtherName] = {
    "allowed-origins": OtherName("cors_origins", unit="list"),
    "allow-credentials": fulfilled("bearer tokens need no cookies (--cors-origins)"),
    "allowed-methods allowed-headers": fulfilled("all that the APIs need are allowed", takes_value=True),
    "api-server-count": same("workers"),
    "uvicorn-log-level": same("log_level", TRACE="debug", CRITICAL="error"),
    "log-level-http": refused("--log-level is that of all processes", idle="warning error critical"),
    "ssl-keyfile ssl-key-file": same("http_key_file"),
    "ssl-certfile ssl-cert-file": same("http_cert_file"),
    "ssl-ca-certs": same("http_client_ca_file"),
    "uds": refused("the gateway listens on --host and --port"),
    "root-path api-prefix path-prefix": refused("put the prefix into the proxy that adds it"),
    "middleware logits-processors tool-parser-plugin tool-call-parser-plugin": refused(_FOREIGN_CODE),
    "reasoning-parser-plugin": refused(_FOREIGN_CODE),
    "enable-custom-logit-processor": refused("no code of requests is run", False),
    "admin-api-key": refused("nothing is administered over HTTP; clients' keys: --api-key-file"),
    "watchdog-timeout": same("hang_timeout_s"),
    "dist-timeout": refused("here --ready-timeout-s and --rank-timeout-s"),
    "skip-server-warmup warmup no-warmup": fulfilled("a server is ready once its kernels are"),
    "sleep-on-idle": fulfilled("processes sleep when there is nothing to compute"),
    "tokenizer-worker-num renderer-num-workers": same("prompt_workers"),
    "disable-frontend-multiprocessing": refused("processes: --workers and --prompt-workers", False),
    "grpc-mode": refused("routers reach the engine at --gpu-address (docs/routers.md)", False),
    "enable-offline-docs": fulfilled("the description at /openapi.json needs no other host"),
    # Requests
    "grammar-backend guided-decoding-backend structured-outputs-config.backend": refused(
        "grammars are always compiled by llguidance", idle="llguidance guidance"
    ),
    "structured-outputs-config": refused("grammars are always compiled by llguidance"),
    "schedule-policy scheduling-policy": refused("requests run in the order they come", idle="fcfs"),
    "schedule-conservativeness": refused("requests run in the order they come", idle="1 1.0"),
    "stream-interval": refused("every token is sent as it comes", idle="1"),
    "chat-template-content-format": fulfilled("templates get the form they ask for", takes_value=True),
    "generation-config": refused(
        "sampling fields of generation_config.json are the defaults of requests", idle="auto"
    ),
    "sampling-defaults": refused("generation_config.json has the defaults of requests", idle="model"),
    "preferred-sampling-params": refused("generation_config.json has the defaults of requests"),
    "allow-auto-truncate": refused("truncate_prompt_tokens is a field of each request", False),
    "response-role": refused("answers are the assistant's", idle="assistant"),
    "override-generation-config": refused("edit generation_config.json in a copy of the checkpoint"),
    "default-chat-template-kwargs chat-template-kwargs": refused(
        "chat_template_kwargs is a field of each request"
    ),
    "max-logprobs": refused("requests may ask for up to 20", idle="5 20"),
    "enable-auto-tool-choice": fulfilled("tools are on wherever their format is known (--tool-call-parser)"),
    "enable-reasoning": fulfilled("reasoning is read wherever its format is known (--reasoning-parser)"),
    "enable-prompt-tokens-details enable-cache-report": fulfilled("usage always says how much was cached"),
    "enable-force-include-usage": refused("stream_options.include_usage is a field of each request", False),
    "tool-server": refused("clients run the tools that a model calls", idle="demo"),
    # Images
    "limit-mm-per-prompt": refused("here --max-images-per-request"),
    "limit-mm-per-prompt.image": OtherName("max_images_per_request", {"0": "@language_model_only=true"}),
    "limit-mm-per-prompt.video limit-mm-per-prompt.audio": refused(
        "a model takes images and text, no others"
    ),
    "enable-multimodal": fulfilled("images are taken where the family has them (--language-model-only)"),
    "allowed-local-media-path": same("image_dir"),
    "allowed-media-domains": same("image_url_hosts"),
    "mm-processor-kwargs media-io-kwargs": refused(
        "here --max-image-megapixels, other values are the checkpoint's"
    ),
    "mm-processor-cache-gb": refused("here --image-cache-mib", idle="4"),
    "mm-processor-cache-type": refused("here --image-cache-mib", idle="lru"),
    "video-pruning-rate": refused("a model takes images and text, no others"),
    "skip-mm-profiling": fulfilled("room for images is computed, not tried out"),
    "disable-fast-image-processor": fulfilled("images are prepared by the family's own code"),
    "disable-chunked-mm-input": refused("images are divided like any part of a prompt", False),
    "keep-mm-feature-on-device enable-mm-global-cache": fulfilled(
        "encoded images stay on the device (--image-cache-mib)"
    ),
    # Logs and measurements
    "enable-metrics metrics": fulfilled("metrics are always served at /metrics"),
    "enable-metrics-for-all-schedulers": fulfilled("metrics of all processes are at /metrics"),
    "disable-log-stats": fulfilled("figures are at /metrics, not in the log"),
    "disable-log-requests disable-uvicorn-access-log no-enable-log-requests": fulfilled(
        "requests are not logged"
    ),
    "disable-access-log-for-endpoints": fulfilled("requests are not logged", takes_value=True),
    "decode-log-interval": refused("figures are at /metrics, not in the log"),
    "log-requests enable-request-time-stats-logging enable-log-outputs enable-log-requests": refused(
        _NO_REQUEST_LOG, False
    ),
    "log-requests-level max-log-len": refused(_NO_REQUEST_LOG),
    "log-config-file": refused("here --log-level and --log-format"),
    "enable-trace": refused("here --otlp-endpoint", False),
    "otlp-traces-endpoint": same("otlp_endpoint"),
    "collect-detailed-traces": fulfilled("traces have all spans (--trace-sample-ratio)", takes_value=True),
    "show-time-cost enable-mfu-metrics": fulfilled("figures of each step are at /metrics"),
    "served-model-names": OtherName("served_model_name"),
    "enable-ui": flag("web_page", "true"),
}
