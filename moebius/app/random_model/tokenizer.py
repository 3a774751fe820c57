"""A tokenizer for any vocabulary size: bytes, three special tokens, and made-up words.

Text is encoded byte by byte; every other id decodes to a word that names it, so that output of a random
model can be read, counted and told apart.
"""

from __future__ import annotations

import json
from pathlib import Path

from moebius.errors import UserError

SPECIAL = ("<|pad|>", "<|start|>", "<|end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|start|>' + message['role'] + '\\n' + message['content'] + '<|end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"
)


def write_tokenizer(directory: Path, vocab_size: int) -> None:
    """tokenizer.json and tokenizer_config.json of `vocab_size` tokens. Raises UserError when too few."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocab_size < len(SPECIAL) + len(alphabet):
        raise UserError(f"vocabulary of {vocab_size}: at least {len(SPECIAL) + len(alphabet)} are needed")
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *alphabet])}
    # "Ġ" is a space to byte-level decoders.
    vocabulary |= {f"\u0120w{number}": number for number in range(len(vocabulary), vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": SPECIAL[0],
        "bos_token": SPECIAL[1],
        "eos_token": SPECIAL[2],
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")
