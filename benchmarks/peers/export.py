"""Write the benchmark's model as a folder in Hugging Face's layout, for the peers that cannot read its GGUF file.

    python benchmarks/peers/export.py FOLDER

The GGUF file's 4-bit blocks are written out in bfloat16, so every peer computes with the same weights. The keys are
those that both old and new versions of transformers read.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from sglite.kernels.weights import dense
from sglite.runtime.hub import resolve_model
from sglite.runtime.loading import load_config, load_tokenizer, open_weights

MODEL = "smollm2-135m"


def export(folder):
    source = resolve_model(MODEL)
    config, weights = load_config(source), open_weights(source)
    tokenizer = load_tokenizer(source, config)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer.to_json())
    write(folder / "tokenizer_config.json", tokenizer_keys(tokenizer))
    write(folder / "config.json", model_keys(config))
    tensors = {name: dense(weights.get(name), torch.bfloat16).contiguous() for name in weights.names()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})  # last: its presence means "done"


def write(path, value):
    path.write_text(json.dumps(value, indent=2) + "\n")


def tokenizer_keys(tokenizer):
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "chat_template": tokenizer.chat_template,
        "clean_up_tokenization_spaces": False,
    }


def model_keys(config):
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.tied_embeddings,
        "bos_token_id": config.bos_id,
        "eos_token_id": config.eos_ids[0],
    }


if __name__ == "__main__":
    export(Path(sys.argv[1]))
