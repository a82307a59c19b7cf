"""Tiny random targets with a multi-token prediction (MTP) layer, and a plain implementation of that layer."""

from pathlib import Path
from typing import Any

import torch
from delta_nets import DELTA_NET_MODELS, save_delta_net
from safetensors.torch import load_file
from tiny_models import edited_weights, save_model, small_config
from torch.nn.functional import rms_norm
from transformers import AutoConfig, AutoModelForCausalLM

from specpool.engine.config.architectures import DELTA_NETS

GLM = {
    "num_hidden_layers": 2, "first_k_dense_replace": 1, "moe_intermediate_size": 32, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "use_qk_norm": True, "num_nextn_predict_layers": 1,
}  # fmt: skip
LATENT = {
    **GLM, "q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 32,
    "num_key_value_heads": 4, "n_group": 1, "topk_group": 1,
}  # fmt: skip
QWEN = {"layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"]}
FAMILIES: dict[str, dict[str, Any]] = {
    "glm4_moe": GLM,
    **dict.fromkeys(("glm4_moe_lite", "deepseek_v3"), LATENT),
    **dict.fromkeys(sorted(DELTA_NETS), QWEN),
}


def stored_names(config: Any) -> dict[str, str]:
    """Return the names of the parts of an MTP layer in checkpoints, or their beginnings."""
    if config.model_type.startswith("qwen"):
        return {
            "fc": "mtp.fc.weight",
            "embedding": "mtp.pre_fc_norm_embedding.weight",
            "state": "mtp.pre_fc_norm_hidden.weight",
            "model.norm.": "mtp.norm.",
            "model.layers.0.": "mtp.layers.0.",
        }
    layer = f"model.layers.{config.num_hidden_layers}."
    return {
        "fc": f"{layer}eh_proj.weight",
        "embedding": f"{layer}enorm.weight",
        "state": f"{layer}hnorm.weight",
        "model.norm.": f"{layer}shared_head.norm.",
        "model.layers.0.": layer,
    }


ONE_LAYER = {
    "num_hidden_layers": 1, "first_k_dense_replace": 0, "layer_types": ["full_attention"],
    "mlp_layer_types": ["sparse"],
}  # fmt: skip


def one_layer(config: Any) -> Any:
    """Return the configuration of a model that consists of the MTP layer."""
    values = config.to_dict()
    return type(config)(**{**values, **{name: value for name, value in ONE_LAYER.items() if values.get(name)}})


def save_mtp_target(folder: Path, family: str, **changes: Any) -> Path:
    """Save a random target whose checkpoint has an MTP layer."""
    changes = {**FAMILIES[family], **changes}
    if family in DELTA_NET_MODELS:
        config: Any = AutoConfig.from_pretrained(save_delta_net(folder / "target", family, **changes))
    else:
        config = small_config(family, **changes)
        save_model(folder / "target", config)
    save_model(folder / "layer", one_layer(config))
    names, hidden, generator = stored_names(config), config.hidden_size, torch.Generator().manual_seed(7)

    def noise(*shape: int) -> torch.Tensor:
        return 0.2 * torch.randn(shape, generator=generator)

    base = 0 if config.model_type.startswith("qwen") else 1  # weight of a norm that changes nothing
    layer = load_file(folder / "layer" / "model.safetensors")
    with edited_weights(folder / "target") as weights:
        weights["model.norm.weight"] = base + noise(hidden)
        weights[names["fc"]] = noise(hidden, 2 * hidden)
        weights |= {names[part]: base + noise(hidden) for part in ("embedding", "state")}
        for prefix in ("model.norm.", "model.layers.0."):
            for name, weight in layer.items():
                if name.startswith(prefix):
                    stored = base + noise(*weight.shape) if weight.dim() == 1 and "norm" in name else weight
                    weights[names[prefix] + name.removeprefix(prefix)] = stored.clone()
    return folder / "target"


def make_alike(target: Path) -> None:
    """Make the target and its MTP layer choose tokens mostly by the last one, so that many drafts are accepted."""
    names = stored_names(AutoConfig.from_pretrained(target))
    with edited_weights(target) as weights:
        for name, weight in weights.items():
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                weight.mul_(0.2)
        weights[f"{names['model.norm.']}weight"] = weights["model.norm.weight"].clone()
        fc = weights[names["fc"]]
        fc.mul_(0.1)
        fc[:, : len(fc)] += torch.eye(len(fc))


class ReferenceMtp:
    """The MTP layer of a target, run over whole sequences by transformers' modules."""

    def __init__(self, target: Path) -> None:
        config: Any = AutoConfig.from_pretrained(target)
        self.weights, self.names = load_file(target / "model.safetensors"), stored_names(config)
        self.eps, self.adds_one = config.rms_norm_eps, config.model_type.startswith("qwen")
        embedding = self.weights["model.embed_tokens.weight"]
        head = self.weights.get("lm_head.weight", embedding)
        state = {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
        for prefix in ("model.norm.", "model.layers.0."):
            stored = self.names[prefix]
            state |= {prefix + n.removeprefix(stored): w for n, w in self.weights.items() if n.startswith(stored)}
        built = type(AutoModelForCausalLM.from_config(config))
        arguments = {"config": one_layer(config), "state_dict": state, "output_loading_info": True}
        self.model, report = built.from_pretrained(None, attn_implementation="eager", dtype=torch.float32, **arguments)
        assert not report["missing_keys"]

    def states(self, features: torch.Tensor) -> torch.Tensor:
        """The states that the layer reads, given the target's before its final norm."""
        return self._norm(features, self.weights["model.norm.weight"])

    @torch.inference_mode()
    def __call__(self, tokens: list[int], states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and own states after each token. `states`: before each token."""
        embedded = self.model.get_input_embeddings()(torch.tensor(tokens))
        parts = [
            self._norm(part, self.weights[self.names[name]])
            for name, part in (("embedding", embedded), ("state", states))
        ]
        joined = torch.cat(parts, -1) @ self.weights[self.names["fc"]].T
        own = self.model.model(inputs_embeds=joined[None], use_cache=False).last_hidden_state[0]
        return self.model.lm_head(own), own

    def draft(self, tokens: list[int], states: torch.Tensor, count: int) -> list[int]:
        """Draft after these tokens. Each step reads the own state of the previous one."""
        drafted = list[int]()
        for _ in range(count):
            logits, own = self(tokens, states)
            drafted.append(int(logits[-1].argmax()))
            tokens, states = [*tokens, drafted[-1]], torch.cat([states, own[-1:]])
        return drafted

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, x.shape[-1:], weight + 1 if self.adds_one else weight, self.eps)
