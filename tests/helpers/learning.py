"""The sequences that a training row becomes."""

from opdcl.data import examples


def encode_example(row, tokenizer, max_length):
    sequences, _ = examples.encode_example(row, tokenizer, max_length)
    return sequences
