"""The sequences that a training row becomes."""

from opdcl.data import learned


def encode_example(row, tokenizer, max_length):
    sequences, _ = learned.encode_example(row, tokenizer, max_length)
    return sequences
