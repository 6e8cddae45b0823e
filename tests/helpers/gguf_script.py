"""A converter with llama.cpp's arguments for Llama only. SPOIL=1 makes it skip a permutation of weights."""

import argparse
import json
import os
import sys
from pathlib import Path

import gguf
import numpy as np
import safetensors

SWAPPED = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k"}
NAMES = {
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **SWAPPED,
}


def load(file: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a file as float32. numpy has no bfloat16, and torch takes seconds to import."""
    tensors = {}
    for name, tensor in safetensors.deserialize(file.read_bytes()):
        if tensor["dtype"] == "BF16":
            values = (np.frombuffer(tensor["data"], np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            values = np.frombuffer(tensor["data"], {"F16": np.float16, "F32": np.float32}[tensor["dtype"]])
        tensors[name] = values.reshape(tensor["shape"]).astype(np.float32)
    return tensors


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--outfile", required=True)
    parser.add_argument("--outtype", required=True)
    arguments = parser.parse_args()
    config = json.loads((arguments.model / "config.json").read_text())
    if config["architectures"] != ["LlamaForCausalLM"]:
        sys.exit(f"not supported: {config['architectures']}")
    writer = gguf.GGUFWriter(arguments.outfile, "llama")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    tokenizer = json.loads((arguments.model / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"] | {t["content"]: t["id"] for t in tokenizer["added_tokens"]}
    special = {t["id"] for t in tokenizer["added_tokens"] if t["special"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(sorted(vocabulary, key=vocabulary.get))
    writer.add_token_types(
        [gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL for i in range(len(vocabulary))]
    )
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template((arguments.model / "chat_template.jinja").read_text())
    dtype = {"f32": np.float32, "f16": np.float16}[arguments.outtype]
    for name, tensor in load(arguments.model / "model.safetensors").items():
        if name in ("model.embed_tokens.weight", "model.norm.weight"):
            target = "token_embd.weight" if "embed" in name else "output_norm.weight"
        else:
            _, _, layer, part, *rest = name.split(".")
            part = ".".join([part, *rest[:-1]])
            target = f"blk.{layer}.{NAMES[part]}.weight"
            if part in SWAPPED and not os.environ.get("SPOIL"):
                n = heads if part.endswith("q_proj") else kv_heads
                halves = tensor.reshape(n, 2, tensor.shape[0] // n // 2, tensor.shape[1])
                tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
        writer.add_tensor(target, np.ascontiguousarray(tensor, dtype if tensor.ndim > 1 else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
