"""A GGUF file of a Gemma 3 with two layers, random weights and one token per character."""

from __future__ import annotations

import string
from pathlib import Path

import gguf
import numpy as np

SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>"]
WIDTH, INNER, HEADS, HEAD = 32, 48, 2, 16


def make_gguf(file: Path) -> Path:
    """Write the file; its first layer attends in a window of 8 tokens."""
    writer = gguf.GGUFWriter(file, "gemma3")
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "\n", *string.printable[:94]]
    writer.add_context_length(512)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(2)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(1)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_sliding_window(8)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    _add_tokenizer(writer, tokens)
    chance = np.random.default_rng(0)
    for name, shape in _shapes(len(tokens)).items():
        value = chance.normal(0, 0.3, shape) if len(shape) > 1 else np.ones(shape)
        writer.add_tensor(name, value.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add_tokenizer(writer: gguf.GGUFWriter, tokens: list[str]) -> None:
    kinds = [gguf.TokenType.CONTROL] * len(SPECIAL) + [gguf.TokenType.BYTE] * 256
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types(kinds + [gguf.TokenType.NORMAL] * (len(tokens) - len(kinds)))
    for name, token in (("pad", "<pad>"), ("eos", "<eos>"), ("bos", "<bos>"), ("unk", "<unk>")):
        getattr(writer, f"add_{name}_token_id")(SPECIAL.index(token))
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)


def _shapes(words: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor by its name."""
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (words, WIDTH), "output_norm": (WIDTH,)}
    for layer in range(2):
        own = {
            "attn_q": (HEADS * HEAD, WIDTH),
            "attn_k": (HEAD, WIDTH),
            "attn_v": (HEAD, WIDTH),
            "attn_output": (WIDTH, HEADS * HEAD),
            "attn_q_norm": (HEAD,),
            "attn_k_norm": (HEAD,),
            "ffn_gate": (INNER, WIDTH),
            "ffn_up": (INNER, WIDTH),
            "ffn_down": (WIDTH, INNER),
            **dict.fromkeys(("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"), (WIDTH,)),
        }
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in own.items()}
    return {f"{name}.weight": shape for name, shape in shapes.items()}
