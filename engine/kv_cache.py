"""The KV cache: one slot a sequence in one arena a layer. A slot's length is an integer elsewhere (`engine.slots`), so
dropping rejected positions costs nothing: they are overwritten when their positions come again."""

import torch


class KVArena:
    """Keys and values of all layers, each [slots, kv_heads, length, head_dim].

    Zeroed once, because attention multiplies masked values by zero and a NaN would survive that; on Linux the pages of
    positions that were never used are not resident.
    """

    def __init__(
        self,
        layers: int,
        slots: int,
        kv_heads: int,
        length: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (slots, kv_heads, length, head_dim)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]

    def write(
        self, layer: int, slots: torch.Tensor, positions: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Stores `key` and `value` [T, kv_heads, head_dim] of T tokens at (slots[t], positions[t])."""
        if key.dtype == torch.float16:  # where an overflow is in reach, and would outlive its sequence in the slot
            key, value = key.nan_to_num(0.0, 0.0, 0.0), value.nan_to_num(0.0, 0.0, 0.0)
        self.keys[layer][slots, :, positions] = key
        self.values[layer][slots, :, positions] = value
