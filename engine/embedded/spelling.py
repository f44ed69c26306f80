"""What the tokens of the shipped tokenizer stand for, byte by byte."""

from typing import Final

from tokenizers import Tokenizer

EOS: Final = "<|im_end|>"
"""Ends every turn, of the model and of the others."""


def token_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """List the bytes that each token id stands for (special tokens: their name)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    spelling = {chr(byte): byte for byte in printable}
    spelling |= {chr(256 + index): byte for index, byte in enumerate(others)}
    added = tokenizer.get_added_tokens_decoder()
    table: list[bytes] = []
    for index in range(tokenizer.get_vocab_size(with_added_tokens=True)):
        if index in added:
            table.append(added[index].content.encode())
        else:
            piece = tokenizer.id_to_token(index) or ""
            table.append(bytes(spelling[char] for char in piece))
    return table
