"""`moebius bench serve`: its options are those that users of other load generators know."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from app.access_options import Access, with_access
from app.cli_options import JsonFile, ModelName

Lengths = Annotated[str, typer.Option(help="Prompts and lengths: sharegpt or random")]
DatasetPath = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Conversations in ShareGPT's JSON [default: lengths drawn like its]"),
]
Rates = Annotated[
    str, typer.Option(help="Requests per second, Poisson arrivals; inf: all at once; comma separated")
]
Concurrencies = Annotated[str, typer.Option(help="Most requests at once, or none; comma separated")]
Endpoint = Annotated[str, typer.Option(help="/v1/chat/completions or /v1/completions")]
Goodput = Annotated[
    str,
    typer.Option(metavar="LIMITS", help="Count requests within these, as in 'ttft:500 tpot:50 e2el:9000'"),
]
Burstiness = Annotated[float, typer.Option(min=0.01, help="1: Poisson; smaller: in bursts; larger: even")]
RangeRatio = Annotated[float, typer.Option(min=0, max=1, help="Spread of random lengths around their means")]
SharegptOutput = Annotated[
    int | None, typer.Option(min=1, help="Output tokens [default: as long as the answers]")
]
IgnoreEos = Annotated[bool, typer.Option(help="Ask for outputs of exactly the length drawn")]


@with_access
def serve(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="OpenAI-compatible server")
    ] = "http://127.0.0.1:8000",
    base_url: Annotated[str, typer.Option(help="The same as URL")] = "",
    endpoint: Endpoint = "/v1/chat/completions",
    model: ModelName = "",
    *,
    access: Access,
    dataset_name: Lengths = "sharegpt",
    dataset_path: DatasetPath = None,
    sharegpt_output_len: SharegptOutput = None,
    random_input_len: Annotated[int, typer.Option(min=1, help="Prompt tokens")] = 1024,
    random_output_len: Annotated[int, typer.Option(min=1, help="Output tokens")] = 128,
    random_range_ratio: RangeRatio = 0.0,
    request_rate: Rates = "inf",
    max_concurrency: Concurrencies = "none",
    burstiness: Burstiness = 1.0,
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests per row")] = 100,
    num_warmups: Annotated[
        int, typer.Option(min=0, help="Requests before the first row, at its concurrency")
    ] = 1,
    goodput: Goodput = "",
    metric_percentiles: Annotated[str, typer.Option(help="In the JSON rows")] = "50,90,99",
    temperature: Annotated[float, typer.Option(min=0, help="0: greedy")] = 0.0,
    ignore_eos: IgnoreEos = True,
    extra_body: Annotated[str, typer.Option(metavar="JSON", help="Further keys of every request")] = "",
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds of silence that fail a request")] = 600.0,
    seed: Annotated[int, typer.Option(min=0, help="Of prompts, lengths and arrivals")] = 0,
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Served from here: memory bandwidth is the limit")
    ] = None,
    json_file: JsonFile = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Write TTFT and ITL as an SVG")] = None,
) -> None:
    """Load on any OpenAI-compatible server. Sweeps of request rate and concurrency, latencies, goodput."""
    from app.bench.serve import sweep
    from app.bench.serve.client import EndpointOptions
    from app.bench.serve.dataset import LengthOptions
    from app.cli_options import parse_counts

    sweep.run(
        EndpointOptions(base_url or url, endpoint, model, access.key, access.tls, temperature, ignore_eos,
                        sweep.parse_extra_body(extra_body), timeout),
        LengthOptions(dataset_name, dataset_path, random_input_len, random_output_len, random_range_ratio,
                      sharegpt_output_len),
        sweep.SweepOptions(sweep.parse_rates(request_rate), sweep.parse_concurrencies(max_concurrency),
                           num_prompts, num_warmups, burstiness, seed, sweep.parse_goodput(goodput),
                           tuple(parse_counts(metric_percentiles, "--metric-percentiles", 100)), checkpoint,
                           json_file, plot),
    )  # fmt: skip
