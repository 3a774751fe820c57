"""Build the Hugging Face tokenizer files from the GGUF's vocabulary, merges and chat template."""

from __future__ import annotations

import json
from pathlib import Path

from moebius.demo_model import recipe
from moebius.demo_model.errors import DemoModelError
from moebius.demo_model.sources import DenseWeights

CONTROL_TOKEN = 3
"""GGUF's token type of control tokens such as <|im_start|>."""


def build_tokenizer(gguf: Path, directory: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja into `directory`.

    Byte-level BPE; digits are single tokens, as llama.cpp's pre-tokenizer "smollm" and the original
    SmolLM2 tokenizer have it. Raises DemoModelError when the GGUF holds another kind of tokenizer.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    source = DenseWeights.open(gguf)
    kind = (source.field("tokenizer.ggml.model"), source.field("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise DemoModelError(f"the GGUF's tokenizer is {kind}, expected byte-level BPE ('gpt2', 'smollm')")
    tokens: list[str] = source.field("tokenizer.ggml.tokens")
    types: list[int] = source.field("tokenizer.ggml.token_type")
    pairs: list[str] = source.field("tokenizer.ggml.merges")
    merges = [(left, right) for left, _, right in (pair.partition(" ") for pair in pairs)]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind_id in zip(tokens, types, strict=True) if kind_id == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    if tokenizer.get_vocab_size() != recipe.VOCAB_SIZE:
        raise DemoModelError(
            f"the tokenizer has {tokenizer.get_vocab_size()} tokens, not {recipe.VOCAB_SIZE}"
        )
    tokenizer.save(str(directory / "tokenizer.json"))
    template: str = source.field("tokenizer.chat_template")
    (directory / "chat_template.jinja").write_text(template)
    _write_tokenizer_config(directory, tokens, template)


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
