"""Sections of the configuration tree (`config.py`) for operators: processes, TLS, telemetry; speculation."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Section(BaseModel):
    """A frozen group of settings; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class SpeculationSettings(Section):
    """The engine's, of speculative decoding (docs/speculation.md); part of its section."""

    speculative_method: Literal[
        "off",
        "auto",
        "ngram",
        "mtp",
        "eagle3",
        "draft_model",
        "ngram+mtp",
        "ngram+eagle3",
        "ngram+draft_model",
    ] = Field(
        default="auto",
        description="Where draft tokens come from: the request's own text (ngram), or the model's MTP layers "
        "(mtp), or an EAGLE-3 head (eagle3), or a smaller model (draft_model), or the text and one of these, "
        "whichever is accepted more often; auto: what speculative_model is, or mtp if there is room for it",
    )
    speculative_model: str = Field(
        default="",
        description="eagle3, draft_model: directory of the head, directory or GGUF file of the model, or its "
        "name on the hub",
    )
    num_draft_tokens: int = Field(
        default=3, ge=1, le=16, description="Draft tokens of each request in a step, at most"
    )
    adaptive_drafts: bool = Field(
        default=True,
        description="Verify only as many draft tokens as are worth it, by measured times of steps",
    )
    ngram_match_min: int = Field(
        default=3, ge=1, le=64, description="ngram: latest tokens that must have been in the text before"
    )
    ngram_match_max: int = Field(
        default=8, ge=1, le=64, description="ngram: of several such places the one that most tokens match"
    )

    @model_validator(mode="after")
    def _matches_in_order(self) -> Self:
        if self.ngram_match_min > self.ngram_match_max:
            raise ValueError(
                f"ngram_match_min: {self.ngram_match_min} is more than ngram_match_max "
                f"({self.ngram_match_max}); allowed: 1 to ngram_match_max"
            )
        return self

    @property
    def may_draft(self) -> bool:
        """Whether steps may verify draft tokens; with auto none does before it is decided."""
        return self.speculative_method not in ("off", "auto")

    @property
    def has_draft_layers(self) -> bool:
        """Whether draft tokens come from layers of the model or from another model, on the device."""
        return self.speculative_method not in ("off", "auto", "ngram")

    @property
    def mtp_heads(self) -> int:
        """Layers of multi-token prediction that are wanted at most: one for each token that is drafted.

        None with auto, which `moebius serve` and `moebius plan` replace by what they decide.
        """
        return self.num_draft_tokens if "mtp" in self.speculative_method else 0


class SupervisorConfig(Section):
    """The launcher of `moebius serve`."""

    state_dir: str = Field(
        default="", description="Directory for sockets and the run file; empty: under the user's runtime dir"
    )
    ready_timeout_s: float = Field(
        default=1800.0, gt=0, description="Longest wait for all processes to be ready"
    )
    restart_backoff_s: float = Field(
        default=0.5,
        gt=0,
        description="Pause before a restart, doubled each time; none for one that has answered requests",
    )
    restart_backoff_max_s: float = Field(default=30.0, gt=0, description="Longest pause before a restart")
    stop_timeout_s: float = Field(
        default=20.0,
        gt=0,
        description="Seconds that running requests may continue after SIGTERM; then they get an error",
    )
    max_loaded_models: int = Field(
        default=1, ge=1, description="Of several models, how many have memory of GPUs at once; others sleep"
    )
    model_residency_s: float = Field(
        default=10.0,
        ge=0,
        description="Seconds that a busy model stays loaded before it makes room for one that is asked for",
    )
    hang_timeout_s: float = Field(
        default=30.0,
        ge=1,
        description="A process that does not respond and uses no CPU for this many seconds is restarted",
    )


class SecurityConfig(Section):
    """TLS of gRPC between processes, and of HTTP; files are PEM and read again when they change."""

    grpc_tls: Literal["off", "tls", "mutual"] = Field(
        default="off",
        description="gRPC of all processes: plain text, servers show a certificate, or clients do as well",
    )
    grpc_cert_file: str = Field(
        default="", description="Certificate of this process as gRPC server and client, its chain after it"
    )
    grpc_key_file: str = Field(default="", description="Private key of that certificate")
    grpc_ca_file: str = Field(default="", description="CA certificates for checking the other processes")
    grpc_server_name: str = Field(
        default="",
        description="Name in certificates of gRPC servers; empty: the address's host, for sockets localhost",
    )
    http_cert_file: str = Field(
        default="", description="Certificate of the HTTP server, its chain after it; empty: plain HTTP"
    )
    http_key_file: str = Field(default="", description="Private key of that certificate")
    http_client_ca_file: str = Field(
        default="", description="CA certificates; HTTP clients need a certificate by one of them; empty: none"
    )


class TelemetryConfig(Section):
    """Logs, traces and metrics of every process."""

    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Lowest level logged"
    )
    log_format: Literal["console", "json"] = Field(
        default="console", description="How log lines are rendered"
    )
    metrics_host: str = Field(
        default="127.0.0.1", description="Address that the metrics ports of all processes bind to"
    )
    grpc_reflection: bool = Field(
        default=False, description="Answer gRPC reflection, which lists every service and message"
    )
    otlp_endpoint: str = Field(
        default="", description="OTLP gRPC endpoint for traces and metrics; empty: none"
    )
    otlp_metrics_interval_s: float = Field(
        default=15.0, ge=0, description="Seconds between two exports of metrics over OTLP; 0: none"
    )
    trace_sample_ratio: float = Field(default=1.0, ge=0, le=1, description="Share of requests traced")
    expert_span_ratio: float = Field(
        default=0.01, ge=0, le=1, description="Share of traced steps with expert spans"
    )
