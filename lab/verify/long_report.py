"""What long outputs show, as a verdict, as JSON and as tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from gpu_service.verify.errors import perplexity
from lab.verify.long_output import LongOutput
from lab.verify.repetition import mean_seq_rep, rep, seq_rep
from lab.verify.report import Check, check_lines
from lab.verify.teacher_forcing import OutputScores
from lab.verify.trend import Trend, Window, spread, trend_of, window_size, windows_of

# The most that the last quarter's mean KL may be of the first quarter's, and a window's of the allowed
# mean: texts differ in how sure a model is of them, and so do parts of one text.
FLAT_FACTOR = 3.0
# What counts as no divergence: below this share of the allowed mean KL a ratio of quarters means nothing.
_FLOOR_SHARE = 0.1
# By how much a server's share of repeated tokens, rep/128, may exceed the reference's on the same sequence.
REPETITION_EXCESS = 0.02


@dataclass(frozen=True)
class OutputReport:
    """One output; filled by `report_output`. KL in nats per token."""

    name: str  # "greedy" or "sampled"
    tokens: int
    mean_kl: float
    p99_kl: float
    max_kl: float
    allowed_kl: float
    top1_agreement: float  # share of tokens whose most probable token is the reference's
    min_top1: float | None
    reference_perplexity: float  # of the output
    # Share of most probable tokens that are among the 128 before: the server's, and the reference's.
    rep_128: float
    reference_rep_128: float
    # Share of 4-grams that have occurred before: in the whole output, in its windows on average, and in as
    # long windows of the text that the prompt is from.
    seq_rep_4: float
    window_seq_rep_4: float
    text_seq_rep_4: float
    trend: Trend
    windows: tuple[Window, ...]

    def checks(self) -> list[Check]:
        """Returns every threshold that applies."""
        worst = max(self.windows, key=lambda window: window.mean_kl)
        floor = _FLOOR_SHARE * self.allowed_kl
        flat = FLAT_FACTOR * max(self.trend.first_quarter, floor)
        limits = [
            ("mean KL", self.mean_kl, self.allowed_kl),
            (
                f"mean KL of tokens {worst.begin} to {worst.end}",
                worst.mean_kl,
                FLAT_FACTOR * self.allowed_kl,
            ),
            ("mean KL of the last quarter", self.trend.last_quarter, flat),
            ("rep/128", self.rep_128, self.reference_rep_128 + REPETITION_EXCESS),
        ]
        found = [Check(f"{self.name}: {what}", value, most, value <= most) for what, value, most in limits]
        if self.min_top1 is not None:
            agreement = self.top1_agreement
            what = f"{self.name}: top-1 agreement"
            found.append(Check(what, agreement, self.min_top1, agreement >= self.min_top1))
        return found


@dataclass(frozen=True)
class LongResult:
    """Filled by `verify_long`."""

    model: str
    reference: str
    tokens: int  # of each output
    wanted_tokens: int
    max_model_len: int
    outputs: tuple[OutputReport, ...]
    generating_seconds: float  # the server's start included, where it was started for this
    reference_seconds: float

    def checks(self) -> list[Check]:
        """Returns those of all outputs."""
        return [check for output in self.outputs for check in output.checks()]

    @property
    def passed(self) -> bool:
        """Returns whether every check passed."""
        return all(check.passed for check in self.checks())

    def document(self) -> dict[str, Any]:
        """Returns the result as the JSON file has it."""
        checks = [asdict(check) for check in self.checks()]
        return asdict(self) | {"checks": checks, "passed": self.passed}


def report_output(
    output: LongOutput, scores: OutputScores, allowed_kl: float, min_top1: float | None, text: Sequence[int]
) -> OutputReport:
    """`text` are the tokens of the text that the prompt is from."""
    token_ids, sequence = output.token_ids.tolist(), output.sequence
    served_top = output.served_top
    same_top = served_top == scores.reference_top
    size = window_size(len(token_ids))
    windows = windows_of(scores.kl, same_top, token_ids, size)
    mean_kl, p99_kl, max_kl = spread(scores.kl)
    return OutputReport(
        name=output.name,
        tokens=len(token_ids),
        mean_kl=mean_kl,
        p99_kl=p99_kl,
        max_kl=max_kl,
        allowed_kl=allowed_kl,
        top1_agreement=float(same_top.double().mean()),
        min_top1=min_top1,
        reference_perplexity=perplexity(scores.reference_loss),
        rep_128=rep(sequence, served_top),
        reference_rep_128=rep(sequence, scores.reference_top),
        seq_rep_4=seq_rep(token_ids),
        window_seq_rep_4=mean_seq_rep(token_ids, size),
        text_seq_rep_4=mean_seq_rep(text, size),
        trend=trend_of(windows),
        windows=windows,
    )


def print_long_result(result: LongResult, console: Console) -> None:
    """A row for every window of each output, then the figures of the whole, and the verdict."""
    for output in result.outputs:
        title = f"{output.name}: {output.tokens} tokens against {result.reference}, KL in nats per token"
        table = Table(title=title, title_justify="left", box=None, header_style="bold")
        for name in ("tokens", "mean KL", "p99", "largest", "same top", "seq-rep-4"):
            table.add_column(name, justify="right", no_wrap=True)
        for window in output.windows:
            table.add_row(
                f"{window.begin}-{window.end}",
                *(f"{kl:.2e}" for kl in (window.mean_kl, window.p99_kl, window.max_kl)),
                f"{window.top1_agreement:.2%}",
                f"{window.seq_rep:.3f}",
            )
        console.print(table)
        for line in _lines(output):
            console.print(line, soft_wrap=True, highlight=False, markup=False)
    for line in _verdict(result):
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def _lines(output: OutputReport) -> list[str]:
    trend = output.trend
    return [
        f"KL divergence: mean {output.mean_kl:.3e}, 99th percentile {output.p99_kl:.3e}, "
        f"largest {output.max_kl:.3e}",
        f"trend: {trend.slope:+.2e} nats per 1000 tokens (95 %: {trend.low:+.2e} to {trend.high:+.2e}); "
        f"first quarter {trend.first_quarter:.2e}, last quarter {trend.last_quarter:.2e}",
        f"same most probable token: {output.top1_agreement:.2%}; "
        f"perplexity by the reference: {output.reference_perplexity:.4f}",
        f"repetition: rep/128 {output.rep_128:.4f}, the reference's {output.reference_rep_128:.4f}; "
        f"seq-rep-4 {output.seq_rep_4:.4f}, in windows {output.window_seq_rep_4:.4f}, "
        f"in those of the prompt's text {output.text_seq_rep_4:.4f}",
        "",
    ]


def _verdict(result: LongResult) -> list[str]:
    lines = [
        f"generated in {result.generating_seconds:.1f} s, scored by the reference in "
        f"{result.reference_seconds:.1f} s"
    ]
    if result.tokens < result.wanted_tokens:
        lines.append(
            f"{result.tokens} tokens instead of {result.wanted_tokens}: the model's context is "
            f"{result.max_model_len}"
        )
    return [*lines, *check_lines(result.checks())]
