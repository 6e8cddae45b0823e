"""The sequences that a training row becomes."""

from opdcl.data import examples


def encode_example(row, tokenizer, max_length):
    return examples.encode_row(row, tokenizer, max_length).sequences
