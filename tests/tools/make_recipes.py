"""Write the pages of docs/recipes from what `moebius plan` says: `make recipes`.

Each model is planned on each machine from its published `config.json` alone (`tests/data/checkpoints`).
`tests/unit/repository/test_recipes.py` checks that the pages are what this program writes.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import structlog

from app.planning.capacity import CapacityPlan, DoesNotFit, Wish
from app.planning.gpu_use import plan_capacity
from app.planning.hardware import HardwareOptions, hardware
from moebius.config.loader import load_config
from tests.helpers.plan_models import GIB, write_config
from tests.helpers.published_checkpoints import Published

PAGES = Path(__file__).resolve().parents[2] / "docs" / "recipes"
STREAMS = (1, 4, 16)
# A command takes the widest format of the experts whose one-stream decode is at least this share of the best.
ENOUGH = 0.6


@dataclass(frozen=True)
class Machine:
    """Filled by MACHINES."""

    title: str
    text: str
    options: Mapping[str, str]  # Of `moebius plan`, without dashes.
    settings: Mapping[str, str]  # Of `moebius plan` and `moebius serve`.


def _host(gpus: str, ram: int, sockets: int, cores: int, bandwidth: int, isa: str) -> dict[str, str]:
    numbers = {"ram": ram, "sockets": sockets, "cores": cores, "bandwidth": bandwidth}
    return {"gpus": gpus, **{name: str(value) for name, value in numbers.items()}, "isa": isa}


def _desktop(gpus: str) -> dict[str, str]:
    return _host(gpus, 180, 1, 16, 70, "avx512_bf16")


def _epyc(gpus: str) -> dict[str, str]:
    return _host(gpus, 1100, 2, 128, 400, "avx512_bf16")


_DESKTOP = "16 cores with AVX-512, 192 GB of two-channel DDR5 (70 GB/s; 180 GiB for Moebius)"
_EPYC = "two EPYC sockets with 64 cores each, 1152 GB (1100 GiB for Moebius), 400 GB/s a socket"
_XEON = "two Xeon sockets with AMX and 56 cores each, 2 TB (1900 GiB for Moebius), 280 GB/s a socket"
MACHINES: Mapping[str, Machine] = {
    "desktop-24": Machine("Desktop with one 24 GB card", f"RTX 4090; {_DESKTOP}.", _desktop("4090"), {}),
    "desktop-32": Machine("Desktop with one 32 GB card", f"RTX 5090; {_DESKTOP}.", _desktop("5090"), {}),
    "server-1": Machine(
        "One 96 GB card, two EPYC sockets", f"RTX PRO 6000; {_EPYC}.", _epyc("rtxpro6000"), {}
    ),
    "server-4": Machine(
        "Four 96 GB cards, two EPYC sockets", f"4 x RTX PRO 6000; {_EPYC}.", _epyc("4xrtxpro6000"), {}
    ),
    "server-8": Machine(
        "Eight H200, two Xeon sockets", f"8 x H200; {_XEON}.", _host("8xh200", 1900, 2, 112, 280, "amx"), {}
    ),
    "server-0": Machine("Two EPYC sockets, no GPU", f"{_EPYC}.", _epyc("none"), {"kv-cache-gib": "16"}),
    "desktop-0": Machine("Desktop, no GPU", f"{_DESKTOP}.", _desktop("none"), {"kv-cache-gib": "8"}),
}
_LAYER = (
    "Measured on its shape: one MoE layer on the CPUs of a 16-core Xeon "
    "([benchmarks](../benchmarks.md#expert-kernels-against-memory-bandwidth)). "
    "The whole model was not measured."
)
_NOTHING = "Nothing of this model has been measured on machines like these yet."


@dataclass(frozen=True)
class Model:
    """Filled by MODELS."""

    name: str  # On the hub.
    title: str
    config: str  # A file of tests/data/checkpoints.
    text: str
    formats: tuple[str, ...]  # Values of --expert-dtype; the first is "keep".
    stored: str  # What "keep" keeps.
    measured: str
    settings: Mapping[str, str] = field(default_factory=dict)  # As Machine's; "": a switch.


_WIDE, _FP8, _FOUR_BITS = ("keep", "int8", "int4"), ("keep", "int4"), ("keep",)
MODELS: Mapping[str, Model] = {
    "qwen3-next-80b": Model(
        "Qwen/Qwen3-Next-80B-A3B-Instruct",
        "Qwen3-Next-80B-A3B",
        "qwen3-next-80b-a3b",
        "80 B parameters, 3 B a token; three of four layers have linear attention.",
        _WIDE,
        "bfloat16",
        _LAYER,
    ),
    "qwen3-coder-30b": Model(
        "Qwen/Qwen3-Coder-30B-A3B-Instruct",
        "Qwen3-Coder-30B-A3B",
        "qwen3-coder-30b-a3b",
        "30.5 B parameters, 3.3 B a token; up to 262 144 tokens of context.",
        _WIDE,
        "bfloat16",
        "Measured, with random weights of this shape in int4 on one H200 and 16 AMX cores "
        "([benchmarks](../benchmarks.md#qwen3-30b-a3b-on-one-h200)): all experts in RAM, 74 tokens/s for one "
        "stream and 216 for 32; all experts on the GPU, 304 for one stream; prompts of 4096 and 16 384 "
        "tokens, experts in RAM, 13 456 and 30 011 tokens/s.",
    ),
    "glm-4.7": Model(
        "zai-org/GLM-4.7",
        "GLM-4.7",
        "glm-4.7",
        "355 B parameters, 32 B a token, three dense layers and a shared expert in each other one.",
        _WIDE,
        "bfloat16",
        _LAYER,
    ),
    "glm-5.3-flash": Model(
        "zai-org/GLM-5.3-Flash",
        "GLM-5.3-Flash",
        "glm-5.3-flash",
        "320 B parameters, 18 B a token, stored in fp8; three of four layers have linear attention, the "
        "others choose what they attend to; takes images: leave out `--language-model-only` and install the "
        "extra `vision`.",
        _FP8,
        "fp8 blocks",
        _NOTHING,
        {"language-model-only": ""},
    ),
    "minimax-m2": Model(
        "MiniMaxAI/MiniMax-M2",
        "MiniMax-M2",
        "minimax-m2",
        "230 B parameters, 10 B a token, stored in fp8.",
        _FP8,
        "fp8 blocks",
        _LAYER,
    ),
    "kimi-k2.5": Model(
        "moonshotai/Kimi-K2.5",
        "Kimi-K2.5",
        "kimi-k2.5",
        "1 T parameters, 32 B a token, experts stored in int4; takes images: leave out "
        "`--language-model-only` and install the extra `vision`.",
        _FOUR_BITS,
        "int4",
        _NOTHING,
        {"language-model-only": ""},
    ),
    "deepseek-v3.2": Model(
        "deepseek-ai/DeepSeek-V3.2",
        "DeepSeek-V3.2",
        "deepseek-v3.2",
        "671 B parameters, 37 B a token, stored in fp8, with sparse attention.",
        _FP8,
        "fp8 blocks",
        _LAYER.replace("its shape", "DeepSeek-V3's shape"),
    ),
    "gpt-oss-120b": Model(
        "openai/gpt-oss-120b",
        "gpt-oss-120b",
        "gpt-oss-120b",
        "117 B parameters, 5.1 B a token, experts stored in MXFP4.",
        _FOUR_BITS,
        "MXFP4",
        _NOTHING,
    ),
}


@cache
def _directory() -> Path:
    return Path(tempfile.mkdtemp(prefix="moebius-recipes-"))


def checkpoint(model: Model) -> Path:
    """Returns a directory with the published config.json and nothing else."""
    directory = _directory() / model.title
    return directory if directory.exists() else write_config(directory, Published.load(model.config).config)


def settings_of(model: Model, machine: Machine, expert_dtype: str) -> dict[str, str]:
    """Options of `moebius serve` and `moebius plan` that stand before what the plan adds."""
    dtype = {} if expert_dtype == "keep" else {"expert-dtype": expert_dtype}
    return {**model.settings, **dtype, **machine.settings}


def plan(model: Model, machine: Machine, expert_dtype: str) -> CapacityPlan:
    """Raises DoesNotFit."""
    given = machine.options
    found = hardware(
        HardwareOptions(
            gpus=given["gpus"],
            ram_gib=float(given["ram"]),
            sockets=int(given["sockets"]),
            cores=int(given["cores"]),
            bandwidth_gbs=float(given["bandwidth"]),
            isa=given["isa"],
        )
    )
    settings = settings_of(model, machine, expert_dtype)
    flags = {name.replace("-", "_"): value or "true" for name, value in settings.items()}
    config = load_config(None, {"model": str(checkpoint(model)), **flags})
    return plan_capacity(config, found, Wish(streams=STREAMS), fill=True)


def _options(settings: Mapping[str, str]) -> str:
    return "".join(f" --{name} {value}".rstrip() for name, value in settings.items())


def plan_command(model: Model, machine: Machine, expert_dtype: str) -> str:
    """Returns what prints the row of that format."""
    options = {**machine.options, **settings_of(model, machine, expert_dtype), "streams": "1,4,16"}
    return f"moebius plan {model.name}{_options(options)}"


def _row(name: str, found: CapacityPlan) -> str:
    gpus = [found.total_of(place) for place in found.places if place != "RAM"]
    gpu = f"{max(gpus) / GIB:.1f}" if gpus else "–"
    # Prefixes have a part of what is left, whatever that is.
    ram = found.total_of("RAM") / GIB - found.kv_offload_gib
    cells = [name, f"{ram:.0f}", gpu, f"{found.residency.share:.0%}"]
    cells += [f"{found.kv.tokens:,}".replace(",", " ")]
    cells += [_rate(row.tokens_per_second) for row in (*found.decode, found.prefill)]
    return f"| {' | '.join(cells)} |"


def _rate(tokens_per_second: float) -> str:
    return f"{tokens_per_second:.{1 if tokens_per_second < 20 else 0}f}"


def _reason(error: DoesNotFit) -> str:
    """Returns the first half of a refusal: what is missing."""
    text = " ".join(str(error).split())
    return text.split("; --expert-dtype")[0].split("; none of these")[0].split(": no setting")[0]


RUN = "<!-- run by: tests/unit/repository/test_recipes.py -->"
COLUMNS = (
    "experts | RAM, GiB | each GPU, GiB | experts on GPUs | KV cache, tokens | 1 stream | 4 | 16 | prefill"
)
HEAD = f"""| {COLUMNS} |
|---|---|---|---|---|---|---|---|---|"""


def section(model: Model, machine: Machine) -> str:
    """Returns a machine's part of a model's page."""
    plans: dict[str, CapacityPlan] = {}
    rows = []
    for expert_dtype in model.formats:
        name = f"{model.stored}, as stored" if expert_dtype == "keep" else expert_dtype
        try:
            plans[expert_dtype] = plan(model, machine, expert_dtype)
        except DoesNotFit as error:
            rows.append(f"Experts in {name}: does not fit; {_reason(error)}.")
            continue
        rows.append(_row(name, plans[expert_dtype]))
    parts = [f"## {machine.title}", machine.text[:1].upper() + machine.text[1:]]
    refused = [row for row in rows if not row.startswith("|")]
    if plans:
        best = max(found.decode[0].tokens_per_second for found in plans.values())
        chosen = next(
            each for each, found in plans.items() if found.decode[0].tokens_per_second >= ENOUGH * best
        )
        flags = _options(settings_of(model, machine, chosen)) + f" {plans[chosen].serve_flags}".rstrip()
        parts += [f"<!-- needs: {machine.title} -->\n```sh\nmoebius serve {model.name}{flags}\n```"]
        parts += ["\n".join([HEAD, *(row for row in rows if row.startswith("|"))])]
        parts += [f"{RUN}\n```sh\n{plan_command(model, machine, chosen)}\n```"]
    parts += refused
    return "\n\n".join(parts) + "\n"


def page(model: Model, sections: Mapping[str, str]) -> str:
    """`sections`: key of MACHINES -> its part."""
    head = f"""# {model.title}

`{model.name}`: {model.text}

{model.measured}

**Every figure in the tables is predicted**, by `moebius plan`: the second command of a machine prints the
plan of the first. [What the columns mean](README.md).
"""
    return "\n".join([head, *(sections[key] for key in MACHINES)])


def main() -> None:
    """Writes all pages."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    for key, model in MODELS.items():
        sections = {name: section(model, machine) for name, machine in MACHINES.items()}
        (PAGES / f"{key}.md").write_text(page(model, sections))


if __name__ == "__main__":
    main()
