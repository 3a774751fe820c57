"""Guards that planned bytes are those of the real thing: packed experts, mailbox, dense weights, KV pages."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from app.planning.gpu_models import GPU_MODELS
from app.planning.memory import arena_bytes, expert_servers, server_bytes, stored_experts
from app.planning.planner import Planner
from expert_service.host import ExpertHost, LoadSettings
from expert_service.placement import ThreadPlacement
from gpu_service.assembly.forecast import Forecast
from gpu_service.assembly.kv_memory import SharedKvMemory, cache_shape
from gpu_service.assembly.rank_plan import make_kv_memory
from gpu_service.cache.request_states import allocate_states
from gpu_service.device import TORCH_DTYPES
from gpu_service.experts.resident.make import make_resident_experts
from gpu_service.loader.load import load_weights
from gpu_service.memory.plan import (
    ACTIVATIONS,
    CONTEXT,
    DENSE,
    KV,
    RING,
    WORKSPACE,
    ExpertMemory,
    parameter_bytes,
    size_kv_pool,
)
from gpu_service.models.compose import build_model
from gpu_service.parallel.group import SoloGroup
from lab.random_model.shapes import parse_shape
from moebius.checkpoint.errors import CheckpointError
from moebius.errors import UserError
from moebius.experts.slices import SliceRequest
from moebius.mailbox import SHARED_MEMORY, Mailbox, MailboxGeometry
from moebius.models.read import read_geometry, read_model_config
from tests.helpers.checkpoints import TinyMoe
from tests.helpers.fake_memory import FakeMemory
from tests.helpers.model_formats import MODEL_FORMATS
from tests.helpers.plan_models import hardware, settings, write_config
from tests.helpers.quantised_checkpoints import QUANTIZATION_CONFIGS, GptOssMoe, QuantisedMoe
from tests.helpers.quantised_models import PlainModel, quantise
from tests.helpers.tiny_models import make_tiny_model
from tests.tolerances import PLANNED_BYTES

DENSE_MODELS = ("deepseek_v3", "gpt_oss_no_bias_tied", "longcat_flash", "qwen3_moe", "qwen3_next")


def packed_bytes(model: Path, index: int, **request: Any) -> int:
    """Returns what a real expert server in this process has mapped."""
    quiet = LoadSettings(calibrate_kernels=False, max_requantise_error=9.0)
    host = ExpertHost(ThreadPlacement(-1, 1, ()), lambda *_: None, lambda: None, quiet)
    return host.load(SliceRequest(str(model), split_index=index, **request)).engine.packed_bytes


@pytest.mark.parametrize("split", ["tensor", "expert"])
@pytest.mark.parametrize("dtype", ["keep", "int4"])
@pytest.mark.parametrize("encoder", ["bfloat16", "fp8_block", "compressed_int4_g32_zeros", "nvfp4", "int8"])
def test_packed_experts_take_what_was_planned(tmp_path: Path, encoder: str, dtype: str, split: str) -> None:
    """The packed experts of each of two servers take, to the byte, what was planned."""
    sizes = TinyMoe(hidden_size=96, moe_intermediate_size=256, num_layers=2, num_experts=3)
    model = QuantisedMoe(encoder, sizes).write(tmp_path / "model")
    geometry = read_geometry(model)
    stored = stored_experts(model, geometry)
    config = settings(model, expert_servers="2", expert_split=split, expert_dtype=dtype)
    for server in expert_servers(config, geometry, stored, 1):
        planned = server_bytes(stored, geometry.hidden_size, server.part, dtype)
        real = packed_bytes(model, server.index, split=split, split_count=2, weight_dtype=dtype)
        assert planned == real


def test_biases_are_counted(tmp_path: Path) -> None:
    """gpt-oss: stacked MXFP4 with biases."""
    model = GptOssMoe().write(tmp_path / "model")
    geometry = read_geometry(model)
    stored = stored_experts(model, geometry)
    (server,) = expert_servers(settings(model), geometry, stored, 1)
    assert server_bytes(stored, geometry.hidden_size, server.part, "keep") == packed_bytes(model, 0)


@pytest.mark.parametrize("nbytes", [1, 4096, 2**20 - 1, 2**20, 2**21 + 1])
def test_arenas_are_whole_pages(nbytes: int) -> None:
    """Small pages below half a huge one, huge pages from there on, never less than asked for."""
    page = 4096 if nbytes < 2**20 else 2**21
    assert arena_bytes(nbytes) >= nbytes
    assert arena_bytes(nbytes) % page == 0
    assert arena_bytes(nbytes) - nbytes < page


@pytest.mark.parametrize("encoder", sorted(set(QUANTIZATION_CONFIGS) - {"float32", "float16"}))
def test_a_configuration_tells_what_headers_will(tmp_path: Path, encoder: str) -> None:
    """Planning before downloading: the same packed formats, cuts and, within 3 %, source bytes.

    Only headers tell whether scales of groups are float16, and whether a scale is of a row or of all.
    """
    source = QuantisedMoe(encoder)
    model = source.write(tmp_path / "model")
    float_per_row = 4 * (2 * source.model.moe_intermediate_size + source.model.hidden_size)
    bare = tmp_path / "bare"
    bare.mkdir()
    config = json.loads((model / "config.json").read_text())
    (bare / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
    found, declared = (stored_experts(path, read_geometry(path)) for path in (model, bare))
    assert declared.keys() == found.keys()
    for layer, experts in found.items():
        assert declared[layer].gate_up.removesuffix("_f16") == experts.gate_up.removesuffix("_f16")
        assert declared[layer].down.removesuffix("_f16") == experts.down.removesuffix("_f16")
        assert declared[layer].has_bias == experts.has_bias
        assert declared[layer].group == experts.group
        assert declared[layer].nbytes == pytest.approx(experts.nbytes, PLANNED_BYTES, float_per_row)


@pytest.mark.parametrize(
    "geometry",
    [
        MailboxGeometry(3, 48, 2, 4, 128, 1, "float32"),
        MailboxGeometry(61, 7168, 8, 8, 128, 2, "bfloat16", 4),
        MailboxGeometry(1, 33, 5, 1, 7, 16, "bfloat16", 8),
    ],
)
def test_the_mailbox_is_as_large_as_planned(geometry: MailboxGeometry) -> None:
    """The segment that C++ makes."""
    name = f"moebius-test-plan-bytes-{os.getpid()}"
    box = Mailbox.create(name, geometry)
    try:
        assert (SHARED_MEMORY / name).stat().st_size == geometry.regions().total
    finally:
        del box
        Mailbox.unlink(name)


@pytest.mark.parametrize(("dtype", "multiplies"), [("auto", True), ("bfloat16", False)])
@pytest.mark.parametrize("name", DENSE_MODELS)
def test_the_engine_takes_what_was_planned(
    tmp_path: Path, name: str, dtype: str, multiplies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dense weights, in 16 bits or widened where the CPU needs it, a tied head's packed copy, KV pages,
    resident experts: all loaded for real.
    """
    monkeypatch.setattr("gpu_service.ops.linear.multiplies_bfloat16", lambda: multiplies)
    make_tiny_model(name, tmp_path)
    given = {"gpu_experts": "2", "kv_cache_gib": "0.01", "device": "cpu", "expert_dtype": "int8"}
    config = settings(tmp_path, dtype=dtype, drop_resident="drop", **given)
    host = hardware(sockets=1, ram_gib=8, multiplies_bfloat16=multiplies)
    plan = Planner(config, on_gpu=False).plan(host)
    planned = {part.part: part.nbytes for part in plan.components}
    model = build_model(Forecast(config, on_gpu=False).model_config, device="cpu")
    load_weights(model, tmp_path)
    copies = [] if model._packed_tied_head is None else [model._packed_tied_head]
    parts = ("dense weights", "dense weights packed as float32", "packed head")
    taken = parameter_bytes(model) + sum(c.numel() * c.element_size() for c in copies)
    assert sum(planned.get(f"engine: {part}", 0) for part in parts) == taken
    assert ("engine: dense weights packed as float32" in planned) is not multiplies
    shape = cache_shape(config.gpu, model.config, model.rank_layers, torch.device("cpu"))
    pages = SharedKvMemory(config, shape).num_pages(model, None, None)
    assert plan.kv.pages == pages
    assert planned["engine: KV cache"] == shape.make(pages).nbytes
    states = allocate_states(config.gpu, model.rank_layers, model.dtype, torch.device("cpu"))
    assert planned.get("engine: states of requests", 0) == (states.nbytes if states else 0)
    geometry = read_geometry(tmp_path)
    dtype = TORCH_DTYPES[model.config.dtype]  # type: ignore[assignment]
    held = make_resident_experts(config, geometry, torch.device("cpu"), dtype)
    assert held is not None
    assert planned["engine: resident experts"] == held.nbytes
    real = packed_bytes(tmp_path, 0, weight_dtype="int8", placement=config.placement)
    assert planned["experts of server 0"] == real < packed_bytes(tmp_path, 0, weight_dtype="int8")


def test_a_gpus_ledger_is_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Assembly on a device of fake memory: the same lines, and the pool it measures is the planned one."""
    model_dir = write_config(tmp_path / "small", parse_shape("small", 0).hf_config(None))
    config = settings(model_dir, max_num_seqs="512")
    plan = Planner(config, on_gpu=True).plan(hardware("4090"), fill=False)
    fake = FakeMemory(GPU_MODELS["RTX 4090"].memory_bytes)
    monkeypatch.setattr("gpu_service.assembly.rank_plan.make_device_memory", lambda device: fake)
    model = build_model(Forecast(config, on_gpu=True).model_config)
    group = SoloGroup()
    parts = {part.part: part.nbytes for part in plan.components if part.place == "GPU 0"}
    held = ExpertMemory(ring_bytes=parts[RING])
    memory, _ = make_kv_memory(config, model, held, group, torch.device("cpu"))
    ledger = memory.ledger
    assert ledger is not None
    assert {line.part: line.nbytes for line in ledger.plan.lines if line.nbytes and line.part != KV} == {
        part: size for part, size in parts.items() if part != KV
    }
    for part in (DENSE, WORKSPACE, ACTIVATIONS):
        fake.allocate(parts[part])
    fake.context = parts[CONTEXT]
    pages = size_kv_pool(ledger.plan, config, model.config, fake.use())
    assert pages == pytest.approx(plan.kv.pages, rel=PLANNED_BYTES)


def test_what_can_not_be_read_is_named(tmp_path: Path) -> None:
    """Impossible divisions, formats that cannot be kept, a scheme that is not known."""
    model = QuantisedMoe("fp8_block").write(tmp_path / "model")
    geometry = read_geometry(model)
    stored = stored_experts(model, geometry)
    with pytest.raises(UserError, match="split_count is 9"):
        expert_servers(settings(model, expert_servers="9"), geometry, stored, 1)
    with pytest.raises(UserError, match="expert_transport local"):
        expert_servers(settings(model, expert_transport="local"), geometry, stored, 1)
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "nobody's"}
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="nobody's"):
        stored_experts(bare, geometry)


def test_layers_kept_in_fp8_are_planned_so(tmp_path: Path) -> None:
    """The model that is planned with has the bytes of the one that is loaded, fewer than dequantised."""
    make_tiny_model("qwen3_moe", tmp_path / "made")
    stored = load_file(next((tmp_path / "made").glob("*.safetensors")))
    plain = PlainModel(tmp_path / "made", None, stored, {}, torch.empty(0))
    kind = MODEL_FORMATS["fp8_block"]
    model = quantise(plain, lambda name: kind if stored[name].ndim == 2 else None, kind.config)
    directory = model.write(tmp_path / "fp8")
    for on_gpu, form in ((False, "packed"), (True, "panels")):
        kept, whole = (
            Forecast(settings(directory, dense_weights=choice), on_gpu=on_gpu).ranks[0].dense_bytes
            for choice in ("keep", "dequantise")
        )
        loaded = build_model(read_model_config(directory))
        load_weights(loaded, directory, form)
        assert kept == parameter_bytes(loaded) < whole
