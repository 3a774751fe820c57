"""Guards `moebius verify`: exact formats pass, coarse ones cost what they cost, wrong experts are named."""

from __future__ import annotations

import json
import shutil
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from safetensors.torch import load_file, save_file

from app import cli
from gpu_service.verify.errors import perplexity, relative_error, score
from lab.verify import experts as verify_experts
from lab.verify import staged_model
from lab.verify.report import Thresholds, VerifyResult, print_result
from lab.verify.run import VerifyOptions, read_tokens, verify_model
from moebius.config import MoebiusConfig
from moebius.errors import UserError
from tests.helpers.deferred_reference import defer_in
from tests.helpers.gguf_models import make_gguf
from tests.helpers.tiny_models import cached_tiny_models, make_tiny_model
from tests.tolerances import EXPERTS_FLOAT32, VERIFY_PERPLEXITY

TOKENS = 40
WRONG = "model.layers.1.mlp.experts.4.gate_proj.weight"
# Latent attention that chooses positions once for several layers: they stay in one stage.
SHARED_CHOICE = "glm_moe_dsa_shared_groups_biased_tied"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """Checkpoints of float32, and transformers' own models of them."""
    return cached_tiny_models(tmp_path_factory.mktemp("verified"))


@pytest.fixture(scope="module")
def wrong(models: Callable[[str], tuple[Path, Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """qwen3_moe with the rows of one expert's matrix shifted."""
    directory = tmp_path_factory.mktemp("wrong") / "model"
    shutil.copytree(models("qwen3_moe")[0], directory)
    tensors = load_file(directory / "model.safetensors")
    tensors[WRONG] = tensors[WRONG].roll(1, dims=0)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 experts, two of which a token chooses; weights as large as trained ones are."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    directory = tmp_path_factory.mktemp("wide")
    torch.manual_seed(3)
    config = Qwen3MoeConfig(
        vocab_size=211,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_experts=48,
        num_experts_per_tok=2,
        max_position_embeddings=128,
        initializer_range=0.1,
    )
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    return directory


def run(directory: Path, options: VerifyOptions | None = None, **sections: dict[str, Any]) -> VerifyResult:
    """On the CPU, one thread."""
    document: dict[str, Any] = {
        "model": {"model": str(directory)},
        "gpu": {"device": "cpu", "gpu_threads": 1},
        "experts": {"calibrate_kernels": False, "expert_threads": 1},
    }
    for name, section in sections.items():
        document[name] = document.get(name, {}) | section
    config = MoebiusConfig.model_validate(document)
    return verify_model(config, options or VerifyOptions(tokens=TOKENS))


@pytest.mark.parametrize(
    "name",
    ["qwen3_moe_bias_dense_tied", "gpt_oss", "deepseek_v3", "qwen3_next", "longcat_flash", SHARED_CHOICE],
)
def test_exact_experts_pass(models: Callable[[str], tuple[Path, Any]], name: str) -> None:
    """Every attention, states, dense layers in between: no error, and transformers' own perplexity."""
    directory, reference = models(name)
    result = run(directory, experts={"split_count": 2})
    assert result.passed
    # LongCat's layers are two of transformers' each.
    count = getattr(reference.config, "num_layers", reference.config.num_hidden_layers)
    assert [layer.layer for layer in result.layers] == list(range(count))
    compared = [layer for layer in result.layers if layer.cpu_error is not None]
    assert compared
    for layer in compared:
        assert 0 < (layer.cpu_error or 0.0) < EXPERTS_FLOAT32
        assert layer.routing_agreement == 1.0
        assert layer.formats == ("float32",)
        assert layer.weight_error == 0.0
    assert all(layer.hidden_error < EXPERTS_FLOAT32 for layer in result.layers)
    assert result.output is not None
    assert result.output.max_kl < 1e-9
    ids = read_tokens(directory, None, TOKENS, reference.config.vocab_size).ids
    with torch.inference_mode():
        loss = torch.nn.functional.cross_entropy(reference(ids[None]).logits[0, :-1], ids[1:])
    expected = float(loss.double().exp())
    assert result.output.reference_perplexity == pytest.approx(expected, rel=VERIFY_PERPLEXITY)
    assert result.output.perplexity == pytest.approx(expected, rel=VERIFY_PERPLEXITY)


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_late_experts_cost_what_they_cost(
    models: Callable[[str], tuple[Path, Any]], tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Figures of `defer_experts` are those of transformers with the rule, also where some are resident."""
    from rich.console import Console

    directory = models(name)[0]
    reference = make_tiny_model(name, tmp_path)
    options: dict[str, Any] = {
        "experts": {"defer_experts": 1, "split_count": 2},
        "placement": {"gpu_experts": 2},
    }
    result = run(directory, **options)
    ids = read_tokens(directory, None, TOKENS, reference.config.vocab_size).ids
    with torch.inference_mode():
        plain = reference(ids[None]).logits[0]
        defer_in(reference, 1)
        late = reference(ids[None]).logits[0]
    found, scores = result.deferral, score(late, plain, torch.cat([ids[1:], torch.tensor([-1])]))
    assert result.passed
    assert result.output is not None
    assert result.output.max_kl < 1e-9
    assert found is not None
    assert found.mean_kl > 1e-6
    assert found.logits_error == pytest.approx(relative_error(late, plain), rel=1e-3)
    assert found.mean_kl == pytest.approx(float(scores.kl.mean()), rel=1e-3)
    assert found.max_kl == pytest.approx(float(scores.kl.max()), rel=1e-3)
    assert found.top1_agreement == float(scores.same_top.double().mean())
    assert found.perplexity == pytest.approx(perplexity(scores.loss), rel=VERIFY_PERPLEXITY)
    print_result(result, Console())
    assert f"defer_experts 1, against none late: KL divergence, nats per token: mean {found.mean_kl:.3e}" in (
        capsys.readouterr().out
    )


def test_requantised_experts_cost_what_they_cost(models: Callable[[str], tuple[Path, Any]]) -> None:
    """int4 costs more than int8, in every column; the verdict follows the thresholds."""
    directory, _ = models("glm4_moe")
    four, eight = (run(directory, experts={"expert_dtype": kind}) for kind in ("int4", "int8"))
    for coarse, fine in zip(four.layers[1:], eight.layers[1:], strict=True):
        assert coarse.formats == ("int4_g32",)
        assert 0.05 < (coarse.weight_error or 0) < 0.15
        assert (coarse.cpu_error or 0) > (coarse.weight_error or 0)
        assert (coarse.cpu_error or 0) > 4 * (fine.cpu_error or 0) > 0
        assert coarse.hidden_error > fine.hidden_error > 0
    assert four.output is not None
    assert eight.output is not None
    assert four.output.mean_kl > 10 * eight.output.mean_kl > 0
    assert four.output.mean_kl <= four.output.p99_kl <= four.output.max_kl
    assert four.output.perplexity != pytest.approx(four.output.reference_perplexity, rel=1e-4)
    for thresholds, passes in (
        (Thresholds(max_kl=10.0), True),
        (Thresholds(max_kl=1e-6), False),
        (Thresholds(max_expert_error=0.01, max_kl=10.0), False),
        (Thresholds(max_kl=10.0, min_top1=1.01), False),
    ):
        found = run(
            directory, VerifyOptions(tokens=TOKENS, thresholds=thresholds), experts={"expert_dtype": "int4"}
        )
        assert found.passed is passes, thresholds


def test_experts_on_the_device_are_reported_apart(models: Callable[[str], tuple[Path, Any]]) -> None:
    """A layer that is shared has both errors, one that is resident as a whole has the device's alone."""
    placement = {"gpu_experts": 3, "gpu_layers": "2"}
    result = run(models("qwen3_moe")[0], model={"dtype": "bfloat16"}, placement=placement)
    shared, whole = result.layers[1], result.layers[2]
    assert result.passed
    assert shared.cpu_error is not None
    assert whole.cpu_error is None
    assert 1e-4 < (shared.gpu_error or 0) < (shared.allowed_error or 0)
    assert 1e-4 < (whole.gpu_error or 0) < (whole.allowed_error or 0)


def test_a_wrong_expert_is_named(models: Callable[[str], tuple[Path, Any]], wrong: Path) -> None:
    """Against the checkpoint that it should be, one layer fails, and its worst expert is the wrong one."""
    good, _ = models("qwen3_moe")
    result = run(wrong, VerifyOptions(against=str(good), tokens=TOKENS))
    assert not result.passed
    failed = [check.what for check in result.checks() if not check.passed]
    assert failed[:2] == ["layer 1, experts of the servers", "layer 1, expert 4: error"]
    assert not any("layer 0" in what for what in failed)
    assert result.layers[1].worst_expert is not None
    assert result.layers[1].worst_expert.expert == 4
    assert run(good, VerifyOptions(against=str(good), tokens=TOKENS)).passed


def spoil(tensors: dict[str, torch.Tensor], layer: int, expert: int, how: str) -> None:
    """Another expert in its place, or its answers 1.3 times as large."""
    prefix = f"model.layers.{layer}.mlp.experts"
    if how == "scaled":
        tensors[f"{prefix}.{expert}.down_proj.weight"] *= 1.3
        return
    for name in ("gate_proj", "up_proj", "down_proj"):
        tensors[f"{prefix}.{expert}.{name}.weight"] = tensors[f"{prefix}.{expert + 1}.{name}.weight"].clone()


@pytest.mark.parametrize("how", ["replaced", "scaled"])
@pytest.mark.parametrize("kind", ["bfloat16", "int8", "int4"])
def test_one_wrong_expert_of_many_fails_and_is_named_alone(
    kind: str, how: str, wide: Path, tmp_path: Path
) -> None:
    """One of 48, chosen by few tokens or by none, in any format: its layer's sum may hide it, a look at it
    alone does not, and no other expert is blamed."""
    options = VerifyOptions(against=str(wide), tokens=6, thresholds=Thresholds(max_kl=10.0))
    itself = run(wide, options, experts={"expert_dtype": kind}, model={"dtype": "bfloat16"})
    assert itself.passed, [check for check in itself.checks() if not check.passed]
    layer = itself.layers[1]
    assert len(layer.experts) == 48
    assert 0 < layer.num_chosen < 48
    chosen = next(found.expert for found in layer.experts[:-1] if found.tokens)
    idle = next(found.expert for found in layer.experts[:-1] if not found.tokens)
    for expert in (chosen, idle):
        directory = tmp_path / f"spoilt-{expert}"
        shutil.copytree(wide, directory)
        tensors = load_file(directory / "model.safetensors")
        spoil(tensors, 1, expert, how)
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
        result = run(directory, options, experts={"expert_dtype": kind}, model={"dtype": "bfloat16"})
        assert not result.passed
        named = [check.what for check in result.checks() if not check.passed and "expert " in check.what]
        assert len(named) == 1, named
        assert named[0].startswith(f"layer 1, expert {expert}: "), named


def test_gguf_models_are_verified(tmp_path: Path) -> None:
    """GGUF models agree with themselves, which packed formats hold exactly, and with their origin."""
    exact = make_gguf("qwen2_moe", tmp_path / "exact")
    itself = run(exact.path)
    assert itself.passed
    assert all((layer.cpu_error or 1.0) < EXPERTS_FLOAT32 for layer in itself.layers)
    original = run(exact.path, VerifyOptions(against=str(exact.published), tokens=TOKENS))
    assert original.passed
    assert all((layer.cpu_error or 0.0) > 0.02 for layer in original.layers)
    products = run(make_gguf("qwen3_moe", tmp_path / "products").path)
    assert products.passed
    assert all((layer.cpu_error or 1.0) < EXPERTS_FLOAT32 for layer in products.layers)


def test_another_model_is_refused(models: Callable[[str], tuple[Path, Any]], tmp_path: Path) -> None:
    """What differs is named with both values; so is a directory that is none."""
    mine, theirs = models("qwen3_moe")[0], models("qwen3_moe_bias_dense_tied")[0]
    with pytest.raises(UserError, match=r"num_experts 9, not 7; top_k 2, not 3; MoE layers \[0, 2\], not"):
        run(mine, VerifyOptions(against=str(theirs)))
    with pytest.raises(UserError, match=r"allowed are bf16, a directory that holds a config.json, and GGUF"):
        run(mine, VerifyOptions(against=str(tmp_path)))


def test_some_layers_only(models: Callable[[str], tuple[Path, Any]]) -> None:
    """Layers in front are the reference's on both sides, those after them are not run at all."""
    directory, _ = models("qwen3_moe")
    result = run(directory, VerifyOptions(tokens=TOKENS, layers="1"), experts={"expert_dtype": "int4"})
    assert [layer.layer for layer in result.layers] == [0, 1]
    assert result.layers[0].cpu_error is None
    assert result.layers[0].hidden_error == 0.0
    assert (result.layers[1].cpu_error or 0.0) > 0.03
    assert result.output is None
    last = run(directory, VerifyOptions(tokens=TOKENS, layers="2"), experts={"expert_dtype": "int4"})
    assert last.output is not None
    assert last.layers[1].hidden_error == 0.0
    with pytest.raises(UserError, match=r"--layers: layer 3 does not exist; the model has layers 0-2"):
        run(directory, VerifyOptions(layers="1-3"))


def test_one_layer_is_in_memory_at_a_time(
    models: Callable[[str], tuple[Path, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only one layer of packed experts and of dense weights is in memory, also where the reference has dense
    weights of its own.
    """
    most = {"experts": 0, "dense": 0}
    alive = {"experts": 0, "dense": 0}

    def counted(kind: str, make: Callable[..., Any]) -> Callable[..., Any]:
        def died() -> None:
            alive[kind] -= 1

        def wrapper(*arguments: Any, **options: Any) -> Any:
            made = make(*arguments, **options)
            alive[kind] += 1
            most[kind] = max(most[kind], alive[kind])
            weakref.finalize(made, died)
            return made

        return wrapper

    monkeypatch.setattr(verify_experts, "make_engine", counted("experts", verify_experts.make_engine))  # type: ignore[attr-defined]
    monkeypatch.setattr(staged_model, "build_model", counted("dense", staged_model.build_model))  # type: ignore[attr-defined]
    directory, _ = models("deepseek_v3")
    copy = directory.parent / "copy"
    shutil.copytree(directory, copy)
    assert run(directory).passed
    assert run(directory, VerifyOptions(against=str(copy), tokens=TOKENS)).passed
    assert most == {"experts": 1, "dense": 1}
    assert alive == {"experts": 0, "dense": 0}


@pytest.fixture
def logging() -> Iterator[None]:
    """The command sets up logging for its process."""
    yield
    structlog.reset_defaults()


@pytest.mark.usefixtures("logging")
def test_exit_status_table_and_json(
    models: Callable[[str], tuple[Path, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """0: passed; 1: beyond a threshold; 2: the command line is wrong, in one line."""
    target = tmp_path / "out.json"
    command = [
        "verify",
        str(models("qwen3_moe")[0]),
        "--tokens",
        "16",
        "--device",
        "cpu",
        "--gpu-threads",
        "1",
    ]
    command += ["--no-calibrate-kernels", "--json", str(target)]
    statuses = []
    for more in (
        [],
        ["--expert-dtype", "int4", "--max-kl", "1e-9"],
        ["--layers", "9"],
        ["--against", "nowhere"],
    ):
        with pytest.raises(SystemExit) as ended:
            cli.main([*command, *more])
        statuses.append(ended.value.code)
        shown = capsys.readouterr()
        if ended.value.code == 2:
            assert len(shown.err.strip().splitlines()) == 1
            continue
        document = json.loads(target.read_text())
        assert document["passed"] is (ended.value.code == 0)
        assert len(document["layers"]) == 3
        assert document["output"]["mean_kl"] >= 0
        assert document["peak_memory"] > 0
        assert f"verdict: {'passed' if document['passed'] else 'FAILED'}" in shown.out
        assert "perplexity" in shown.out
        assert "most memory taken" in shown.out
    assert statuses == [0, 1, 2, 2]
