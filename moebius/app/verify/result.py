"""What was found, and the verdict. Everything relative is a norm over a norm, see docs/verify.md."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Thresholds:
    """From when on a model is refused; filled from the command line, None: the table of `verify.allowed`."""

    max_expert_error: float | None = None
    max_kl: float | None = None
    # Share of tokens with the same most probable next token; None: not judged.
    min_top1: float | None = None


@dataclass(frozen=True)
class LayerResult:
    """One decoder layer; filled by `Comparison`. None: the layer has nothing of the kind, or was left out."""

    layer: int
    # Packed formats of gate and up, and of down; empty: no experts were compared.
    formats: tuple[str, ...] = ()
    # What rounding cost the weights themselves.
    weight_error: float | None = None
    # Of the experts' weighted sum, given the reference's rows and choices: of servers' experts, of the GPU's.
    cpu_error: float | None = None
    gpu_error: float | None = None
    allowed_error: float | None = None
    # The expert whose tokens are farthest off, and how far.
    worst_expert: int | None = None
    worst_expert_error: float | None = None
    # Share of the reference's chosen experts that ours chose, too, each given its own hidden states.
    routing_agreement: float | None = None
    # Of the residual stream behind the layer: all that has come together so far.
    hidden_error: float = 0.0


@dataclass(frozen=True)
class OutputResult:
    """Next-token distributions; filled by `summarise`. Nats per token."""

    mean_kl: float
    p99_kl: float
    max_kl: float
    allowed_kl: float
    # Share of tokens with the same most probable next token.
    top1_agreement: float
    reference_perplexity: float
    perplexity: float


@dataclass(frozen=True)
class Check:
    """One threshold; filled by `VerifyResult.checks`."""

    what: str
    found: float
    # At most so much; for shares, at least.
    allowed: float
    passed: bool


@dataclass(frozen=True)
class VerifyResult:
    """Filled by `verify_model`."""

    model: str
    reference: str
    expert_dtype: str
    rows_dtype: str
    device: str
    # How the text became token ids: "tokenizer", or "bytes" where the checkpoint has none.
    tokens_from: str
    tokens: int
    layers: tuple[LayerResult, ...]
    # None: layers behind the compared ones were left out.
    output: OutputResult | None
    thresholds: Thresholds
    # Most memory this process has taken, bytes.
    peak_memory: int
    seconds: float

    def checks(self) -> list[Check]:
        """Every threshold that applies, the worst layer for all."""
        found: list[Check] = []
        for layer in self.layers:
            for where, error in (("servers", layer.cpu_error), ("GPU", layer.gpu_error)):
                if error is not None and layer.allowed_error is not None:
                    passed = error <= layer.allowed_error
                    name = f"layer {layer.layer}, experts of the {where}"
                    found.append(Check(name, error, layer.allowed_error, passed))
        failed = [check for check in found if not check.passed]
        # The one with the least room speaks for those that pass.
        tightest = sorted(found, key=lambda check: check.found / check.allowed if check.allowed else 0.0)
        checks = failed or tightest[-1:]
        if self.output is not None:
            out = self.output
            checks.append(Check("mean KL", out.mean_kl, out.allowed_kl, out.mean_kl <= out.allowed_kl))
            wanted = self.thresholds.min_top1
            if wanted is not None:
                checks.append(
                    Check("top-1 agreement", out.top1_agreement, wanted, out.top1_agreement >= wanted)
                )
        return checks

    @property
    def passed(self) -> bool:
        """The verdict."""
        return all(check.passed for check in self.checks())

    def document(self) -> dict[str, Any]:
        """For the JSON file."""
        checks = [asdict(check) for check in self.checks()]
        return asdict(self) | {"checks": checks, "passed": self.passed}
