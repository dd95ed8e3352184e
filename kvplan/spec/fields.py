"""One checked view of a config.json: old and new names of a key, its type, and errors that name it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvplan.errors import InputError

# What each fact is called in published configs, today's name first.
NAMES: dict[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size", "n_embd", "n_embed", "d_model"),
    "num_hidden_layers": (
        "num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "decoder_layers",
    ),
    "num_attention_heads": (
        "num_attention_heads", "n_head", "n_heads", "decoder_attention_heads", "num_heads",
    ),
    "num_key_value_heads": ("num_key_value_heads", "n_head_kv", "attn_config.kv_n_heads"),
    "head_dim": ("head_dim", "attention_head_dim", "kv_channels", "d_kv"),
    "intermediate_size": (
        "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff", "decoder_ffn_dim",
        "ffn_config.ffn_hidden_size",
    ),
    "dense_intermediate_size": ("dense_intermediate_size", "intermediate_size_mlp"),
    "moe_latent_size": ("moe_latent_size", "routed_expert_hidden_size"),
    "vocab_size": ("vocab_size", "padded_vocab_size"),
    # Engines take model_max_length where a config has it (Command R says 8192 and means 131072).
    "max_position_embeddings": (
        "model_max_length", "max_position_embeddings", "n_positions", "max_seq_len", "seq_length",
        "max_target_positions", "max_sequence_length", "n_ctx",
    ),
    "num_experts": (
        "num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts",
        "ffn_config.moe_num_experts",
    ),
    "num_experts_per_tok": (
        "num_experts_per_tok", "num_experts_per_token", "top_k_experts", "experts_per_token", "moe_k",
        "ffn_config.moe_top_k",
    ),
    "n_shared_experts": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    "shared_expert_intermediate_size": (
        "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size",
        "shared_intermediate_size", "share_expert_dim",
    ),
    "mtp_layers": ("mtp_num_hidden_layers", "num_nextn_predict_layers", "num_mtp_modules"),
    "sliding_window": ("sliding_window", "sliding_window_size"),
    "sliding_window_pattern": ("sliding_window_pattern", "_sliding_window_pattern"),
    "dtype": ("dtype", "torch_dtype"),
    "mamba_num_heads": ("mamba_num_heads", "mamba_n_heads"),
    "mamba_head_dim": ("mamba_head_dim", "mamba_d_head"),
    "mamba_groups": ("n_groups", "mamba_n_groups"),
    "mamba_state_size": ("ssm_state_size", "state_size", "mamba_d_state"),
    "mamba_conv_kernel": ("conv_kernel", "mamba_d_conv"),
    "mamba_expand": ("expand", "mamba_expand"),
    "mamba_dt_rank": ("time_step_rank", "mamba_dt_rank"),
    "mamba_ssm_dtype": ("mamba_ssm_dtype", "mamba_ssm_cache_dtype"),
}  # fmt: skip

# Above these a config is not a model but a mistake (or an attack on our memory).
LARGEST: dict[str, int] = {"num_hidden_layers": 10_000}
LARGEST_OTHER = 1 << 31

Int = int  # the method `Fields.int` hides the type inside the class


class Fields:
    """Read typed values from ``config`` (the text part); ``defaults`` are the class's own, by our name.

    Every default that was used is recorded in ``assumed``, every value read in ``used``.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        where: str,
        architecture: str,
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        self.config = config
        self.where = where
        self.architecture = architecture
        self.defaults = dict(defaults or {})
        self.assumed: dict[str, Any] = {}

    def raw(self, key: str) -> tuple[str, Any]:
        """The name under which ``key`` was found and its value; null counts as absent."""
        for name in NAMES.get(key, (key,)):
            value: Any = self.config
            for part in name.split("."):
                value = value.get(part) if isinstance(value, Mapping) else None
            if value is not None:
                return name, value
        if self.defaults.get(key) is not None:
            self.assumed[key] = self.defaults[key]
            return key, self.defaults[key]
        return key, None

    def has(self, key: str) -> bool:
        return self.raw(key)[1] is not None

    def int(self, key: str, otherwise: Int | None = None) -> Int:
        """A whole number > 0, or ``otherwise`` when the key is absent or null."""
        value = self._whole(key, 1)
        if value is None:
            if otherwise is None:
                raise self.missing(key)
            return otherwise
        return value

    def optional_int(self, key: str) -> Int:
        """A whole number >= 0; 0 when absent."""
        return self._whole(key, 0) or 0

    def flag(self, key: str, otherwise: bool = False) -> bool:
        name, value = self.raw(key)
        if value is None:
            return otherwise
        if not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return value

    def text(self, key: str, otherwise: str = "") -> str:
        name, value = self.raw(key)
        if value is None:
            return otherwise
        if not isinstance(value, str):
            raise self.wrong(name, value, "a string")
        return value

    def items(self, key: str, length: Int | None = None) -> list[Any] | None:
        """A list, of ``length`` items when given; None when absent."""
        name, value = self.raw(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) > LARGEST["num_hidden_layers"]:
            raise self.wrong(name, value, "a list")
        if length is not None and len(value) != length:
            raise self.error(f"{name} has {len(value)} entries; must have one per layer, {length}")
        return value

    def section(self, key: str) -> Mapping[str, Any]:
        name, value = self.raw(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self.wrong(name, value, "an object")
        return value

    def _whole(self, key: str, least: Int) -> Int | None:
        name, value = self.raw(key)
        if value is None:
            return None
        if isinstance(value, float) and value == value and abs(value) < 2**53 and value == int(value):
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.wrong(name, value, f"a whole number >= {least}")
        largest = LARGEST.get(key, LARGEST_OTHER)
        if value > largest:
            raise self.wrong(name, value, f"at most {largest:,}")
        return value

    def missing(self, key: str) -> InputError:
        names = NAMES.get(key, (key,))
        other = f" (or {', '.join(names[1:])})" if len(names) > 1 else ""
        return self.error(f"{names[0]}{other} is missing")

    def wrong(self, name: str, value: Any, must: str) -> InputError:
        shown = repr(value) if not isinstance(value, list | Mapping) else type(value).__name__
        return self.error(f"{name} is {shown[:60]}; must be {must}")

    def error(self, text: str) -> InputError:
        return InputError(f"{self.where}: {self.architecture}: {text}.")
