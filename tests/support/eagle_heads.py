"""Random EAGLE heads for tiny targets, in the format of their authors, and a plain implementation of them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu
from transformers import AutoConfig, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCAB = 64, 4, 2, 16, 96, 257
ROWS = 100
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "max_position_embeddings": 256,
    "num_attention_heads": HEADS,
    "num_hidden_layers": 1,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": VOCAB,
}


def save_eagle_head(
    folder: Path, version: int, *, pickled: bool = False, width: int = HIDDEN, speculator: bool = False, **config: Any
) -> Path:
    """Save a random head of EAGLE-1 or EAGLE-3. `width`: hidden size of the target. `config`: changes.

    `speculator`: in the format of the speculators library.
    """
    folder.mkdir()
    speculators = {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}
    stated = {**speculators, "transformer_layer_config": CONFIG} if speculator else CONFIG
    (folder / "config.json").write_text(json.dumps({**stated, **config}))
    torch.manual_seed(version)
    layer, inputs = ("layers.0", HIDDEN) if version == 1 else ("midlayer", 2 * HIDDEN)
    layer = "layers.0" if speculator else layer
    shapes: dict[str, tuple[int, ...]] = {
        f"{layer}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, inputs),
        f"{layer}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, inputs),
        f"{layer}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, inputs),
        f"{layer}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        f"{layer}.mlp.gate_proj.weight": (MLP, HIDDEN),
        f"{layer}.mlp.up_proj.weight": (MLP, HIDDEN),
        f"{layer}.mlp.down_proj.weight": (HIDDEN, MLP),
        f"{layer}.post_attention_layernorm.weight": (HIDDEN,),
    }
    if version == 1:
        shapes |= {"fc.weight": (HIDDEN, 2 * HIDDEN), "fc.bias": (HIDDEN,), "embed_tokens.weight": (VOCAB, HIDDEN)}
    else:
        shapes |= {f"{layer}.{name}.weight": (HIDDEN,) for name in ("input_layernorm", "hidden_norm")}
        shapes |= {"fc.weight": (HIDDEN, 3 * width), "norm.weight": (HIDDEN,), "lm_head.weight": (ROWS, HIDDEN)}
        extended = config.get("eagle_config")
        flags = {**config, **extended} if isinstance(extended, dict) else config
        if flags.get("norm_before_fc"):
            shapes["input_norm.weight"] = (3 * width,)
        if flags.get("fc_norm"):
            shapes |= {f"fc_norm.{part}.weight": (width,) for part in range(3)}
    tensors = {
        name: torch.randn(shape) * 0.15 if len(shape) > 1 else 1 + 0.2 * torch.randn(shape)
        for name, shape in shapes.items()
    }
    if version == 3:
        chosen = torch.randperm(VOCAB)[:ROWS].sort().values
        tensors["d2t"] = chosen - torch.arange(ROWS)
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, chosen, True)
    save_tensors(folder, tensors, pickled=pickled)
    return folder


def save_tensors(folder: Path, tensors: dict[str, torch.Tensor], *, pickled: bool = False) -> None:
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")


class ReferenceHead:
    """A head as its authors describe it, over whole sequences."""

    def __init__(self, folder: Path, target: Path) -> None:
        pickled = folder / "pytorch_model.bin"
        self.own = torch.load(pickled) if pickled.is_file() else load_file(folder / "model.safetensors")
        self.target = load_file(target / "model.safetensors")
        stated = json.loads((folder / "config.json").read_text())
        config = LlamaConfig.from_dict(stated.get("transformer_layer_config", stated))
        self.eps, self.rotary = config.rms_norm_eps, LlamaRotaryEmbedding(config)
        self.target_eps = AutoConfig.from_pretrained(target).rms_norm_eps
        self.is_eagle3 = "norm.weight" in self.own
        self.layer = "midlayer" if "midlayer.hidden_norm.weight" in self.own else "layers.0"
        self.flags = {**stated, **stated.get("eagle_config", {})}

    def states(self, features: torch.Tensor) -> torch.Tensor:
        """The states that the head reads, of those of the target before its final norm."""
        if not self.is_eagle3:
            return rms_norm(features, (HIDDEN,), self.target["model.norm.weight"], self.target_eps)
        if self.flags.get("norm_before_fc"):
            features = self._norm("input_norm", features)
        if self.flags.get("fc_norm"):
            chunks = features.chunk(3, -1)
            features = torch.cat([self._norm(f"fc_norm.{part}", chunk) for part, chunk in enumerate(chunks)], -1)
        return features @ self.own["fc.weight"].T

    def __call__(self, tokens: list[int], states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of the whole vocabulary, and the own states, after each token."""
        embeddings = self.own.get("embed_tokens.weight", self.target["model.embed_tokens.weight"])
        embedded = embeddings[torch.tensor(tokens)]
        if self.is_eagle3:
            embedded, state = self._norm(f"{self.layer}.input_layernorm", embedded), states
            normed = self._norm(f"{self.layer}.hidden_norm", state)
            residual = normed if self.flags.get("norm_before_residual") else state
            hidden = self._layer(self.layer, residual, torch.cat([embedded, normed], -1))
            output = self._norm("norm", hidden)
            logits = torch.full((len(tokens), VOCAB), -torch.inf)
            logits[:, torch.arange(ROWS) + self.own["d2t"]] = output @ self.own["lm_head.weight"].T
            return logits, output if self.flags.get("norm_output") else hidden
        joined = torch.cat([embedded, states], -1) @ self.own["fc.weight"].T + self.own["fc.bias"]
        hidden = self._layer("layers.0", joined, joined)
        return hidden @ self.target["lm_head.weight"].T, hidden

    def _layer(self, name: str, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        def linear(part: str, x: torch.Tensor) -> torch.Tensor:
            return x @ self.own[f"{name}.{part}.weight"].T

        query, key, value = (
            linear(f"self_attn.{part}_proj", x).view(len(x), -1, HEAD_DIM).transpose(0, 1)[None] for part in "qkv"
        )
        query, key = apply_rotary_pos_emb(query, key, *self.rotary(x, torch.arange(len(x))[None]))
        attended = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        hidden = residual + linear("self_attn.o_proj", attended[0].transpose(0, 1).flatten(1))
        normed = self._norm(f"{name}.post_attention_layernorm", hidden)
        return hidden + linear("mlp.down_proj", silu(linear("mlp.gate_proj", normed)) * linear("mlp.up_proj", normed))

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, x.shape[-1:], self.own[f"{name}.weight"], self.eps)
