"""The byte <-> printable character table of byte-level BPE vocabularies (Radford et al., GPT-2, 2019)."""

from __future__ import annotations


def _characters() -> dict[str, int]:
    """Printable Latin-1 bytes stand for themselves; the other 68 bytes are numbered from U+0100 up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + number): byte for number, byte in enumerate(others)})
    return table


CHARACTER_TO_BYTE = _characters()
_BYTE_TO_CHARACTER = {byte: character for character, byte in CHARACTER_TO_BYTE.items()}


def bytes_to_piece(token: bytes) -> str:
    """Returns how such a vocabulary spells a token."""
    return "".join(_BYTE_TO_CHARACTER[byte] for byte in token)


def piece_to_bytes(piece: str) -> bytes:
    """Bytes a vocabulary piece stands for; a piece with a character outside the table is literal UTF-8."""
    try:
        return bytes([CHARACTER_TO_BYTE[character] for character in piece])
    except KeyError:
        return piece.encode()
