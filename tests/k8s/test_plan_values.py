"""Guards `moebius plan --values`: the chart takes what it writes, and the numbers are the plan's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from app import cli
from lab.random_model.shapes import parse_shape
from moebius.config.loader import load_config
from tests.helpers.chart import render
from tests.helpers.plan_models import PUBLISHED, write_config

pytest.importorskip("helm_python", reason="helm-python-sdk is not installed")
pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
from tests.k8s.manifests import check_manifest, pod_specs

MIB = 2**20
HOST = ("--bandwidth", "300", "--isa", "amx")
CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "no GPU": ("small", ("--gpus", "none", "--ram", "64", "--sockets", "2", "--cores", "32")),
    "one GPU": ("qwen3-30b-a3b", ("--gpus", "1x4090", "--ram", "256", "--sockets", "2", "--cores", "64")),
    "two GPUs, three sockets": (
        "glm-4.7",
        ("--gpus", "2xh200", "--ram", "1500", "--sockets", "3", "--cores", "96", "--expert-dtype", "int8"),
    ),
    "unequal shares": (
        "qwen3-30b-a3b",
        ("--gpus", "none", "--ram", "400", "--sockets", "2", "--cores", "32", "--split-shares", "2,1"),
    ),
    "unequal GPUs": (
        "qwen3-30b-a3b",
        ("--gpus", "4090+3060", "--ram", "256", "--sockets", "1", "--cores", "32", "--expert-dtype", "int4"),
    ),
    "all resident": ("small", ("--gpus", "2x4090", "--ram", "64", "--sockets", "1", "--cores", "16")),
}


def planned(directory: Path, case: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(values, plan's document) of one case."""
    name, options = CASES[case]
    config = parse_shape("small", 0).hf_config(None) if name == "small" else PUBLISHED[name][0]
    model = write_config(directory / name, config)
    values, document = directory / "values.yaml", directory / "plan.json"
    arguments = ["plan", str(model), *options, *HOST, "--values", str(values), "--json", str(document)]
    with pytest.raises(SystemExit) as exit_info:
        cli.main(arguments)
    assert not exit_info.value.code
    return yaml.safe_load(values.read_text()), json.loads(document.read_text())


@pytest.mark.parametrize("case", CASES)
def test_the_chart_takes_a_plans_values(case: str, tmp_path: Path) -> None:
    """Requests hold what the plan counts, and little more; settings reach the processes."""
    values, plan = planned(tmp_path, case)
    values["model"]["source"] = {"type": "pvc", "pvc": {"claimName": "models"}}
    manifests = render(values)
    for manifest in manifests:
        check_manifest(manifest)
    ram = {part["part"]: part["nbytes"] for part in plan["components"] if part["place"] == "RAM"}
    engine = sum(nbytes for name, nbytes in ram.items() if name.startswith("engine"))
    held = [nbytes for name, nbytes in ram.items() if name.startswith("experts of server")]
    mailbox = ram.get("mailbox", 0)
    pod = next(
        one
        for one in pod_specs(manifests)
        if one["metadata"]["labels"].get("app.kubernetes.io/component") == "engine"
    )
    limits = {
        one["name"]: int(one["resources"]["limits"]["memory"].removesuffix("Mi")) * MIB
        for one in (*pod["spec"]["initContainers"], *pod["spec"]["containers"])
    }
    assert engine + mailbox <= limits["engine"] <= engine + mailbox + 100 * MIB
    assert [name for name in limits if name.startswith("expert-")] == [
        f"expert-{i}" for i in range(len(held))
    ]
    for index, nbytes in enumerate(held):
        assert nbytes + mailbox <= limits[f"expert-{index}"] <= sum(ram.values())
    if held:
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        size = int(volumes["weights"]["emptyDir"]["sizeLimit"].removesuffix("Mi")) * MIB
        assert sum(held) <= size <= sum(held) * 1.1 + 64 * MIB * len(held)
    settings = tmp_path / "moebius.yaml"
    text = next(one for one in manifests if one["kind"] == "ConfigMap" and "moebius.yaml" in one["data"])
    settings.write_text(text["data"]["moebius.yaml"])
    config = load_config(settings)
    assert config.experts.split_count == max(1, len(held))
    assert config.parallel.tensor_parallel_size == int(plan["settings"]["tensor_parallel_size"])
    stages = plan["settings"].get("pipeline_layers", "")
    assert ",".join(map(str, config.parallel.pipeline_layers)) == stages
    assert bool(stages) == (case == "unequal GPUs")
    if held and plan["residency"]["count"]:
        assert config.placement.gpu_experts == max(plan["residency"]["by_layer"].values())
    if case == "two GPUs, three sockets":
        assert config.experts.expert_dtype == "int8"
    if case == "unequal shares":
        assert config.experts.split_shares == (2, 1)
        assert limits["expert-0"] > limits["expert-1"]
