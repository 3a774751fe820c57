"""Build the Hugging Face tokenizer files from the GGUF's vocabulary, merges and chat template."""

from __future__ import annotations

import json
from pathlib import Path

from moebius.app.demo_model import recipe
from moebius.app.demo_model.errors import DemoModelError
from moebius.app.demo_model.sources import DenseWeights


def build_tokenizer(gguf: Path, directory: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja into `directory`.

    Byte-level BPE; digits are single tokens, as llama.cpp's pre-tokenizer "smollm" and the original
    SmolLM2 tokenizer have it. Raises DemoModelError when the GGUF holds another kind of tokenizer.
    """
    from moebius.checkpoint.gguf.tokenizer import read_tokenizer

    source = DenseWeights.open(gguf)
    kind = (source.field("tokenizer.ggml.model"), source.field("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise DemoModelError(f"the GGUF's tokenizer is {kind}, expected byte-level BPE ('gpt2', 'smollm')")
    found = read_tokenizer(gguf)
    tokenizer = found.backend
    if tokenizer.get_vocab_size() != recipe.VOCAB_SIZE:
        raise DemoModelError(
            f"the tokenizer has {tokenizer.get_vocab_size()} tokens, not {recipe.VOCAB_SIZE}"
        )
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(found.chat_template)
    _write_tokenizer_config(directory, source.field("tokenizer.ggml.tokens"), found.chat_template)


def _write_tokenizer_config(directory: Path, tokens: list[str], template: str) -> None:
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": tokens[recipe.BOS_TOKEN_ID],
        "eos_token": tokens[recipe.EOS_TOKEN_ID],
        "pad_token": tokens[recipe.PAD_TOKEN_ID],
        "unk_token": tokens[0],
        "clean_up_tokenization_spaces": False,
        "model_max_length": recipe.CONTEXT_LENGTH,
        "chat_template": template,
    }
    text = json.dumps(settings, indent=2, ensure_ascii=False)
    (directory / "tokenizer_config.json").write_text(text + "\n")
