"""Small real tokenizers, made in milliseconds: byte-level BPE, and one that decodes as SentencePiece does."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. The dog sleeps; the fox runs on over the hill.",
    "Numbers 0 1 2 3 4 5 6 7 8 9 and punctuation, too: (yes) [no] {maybe}!",
    "Größe, naïve café, 東京タワー, emoji 😀👩‍👩‍👧 and combining e\u0301.",
] * 3
BOS, EOS, PAD = "<|start|>", "<|end|>", "<|pad|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|start|>' + message['role'] + '\\n' + message['content'] + '<|end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"
)


def byte_level_tokenizer(vocab_size: int = 400) -> Tokenizer:
    """Returns byte-level BPE with three special tokens (ids 0, 1, 2) and one added token that is
    not special.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool call>", normalized=False)])
    return tokenizer


def metaspace_tokenizer() -> Tokenizer:
    """Returns character BPE with `▁` for spaces and byte fallback, decoded as SentencePiece models are."""
    characters = sorted(set("".join(CORPUS)) - {" ", "😀", "東"})
    pieces = ["<unk>", BOS, EOS, *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *characters]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([BOS, EOS])
    return tokenizer


def write_tokenizer(directory: Path, tokenizer: Tokenizer, template: str | None = CHAT_TEMPLATE) -> Path:
    """Writes tokenizer.json and tokenizer_config.json as checkpoints have them; returns `directory`."""
    tokenizer.save(str(directory / "tokenizer.json"))
    settings: dict[str, object] = {"bos_token": BOS, "eos_token": {"content": EOS}}
    if template is not None:
        settings["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory
