"""Named sizes of the zoo's models.

``base`` and ``large`` have the widths of public kernel benchmarks: 384 = 3 heads × 128 and 512 = 4 × 128, generated
feed-forward layers of 128 and 256, 256 seeds pooled to 32 tokens by 8 Kronecker products. ``small`` trains on two CPU cores,
``tiny`` is for tests.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .bst import BSTConfig
from .gem import GEMConfig
from .hstu import HSTUConfig
from .interformer import InterFormerConfig
from .kunlun import KunlunConfig
from .parts.kunlun import EventConfig
from .sasrec_ranker import SASRecRankerConfig
from .wukong import WukongConfig

NAMES = ("tiny", "small", "base", "large")

EVENTS = {
    "tiny": EventConfig(d=16, n_heads=2, window=3, block=4, n_seeds=6, n_tokens=3, kron_rank=2, dff=8),
    "small": EventConfig(d=64, n_heads=2, n_layers=3, window=32, n_seeds=16, n_tokens=4, kron_rank=4, dff=64),
    "base": EventConfig(
        d=384, n_heads=3, n_layers=6, window=100, n_seeds=256, n_tokens=32, kron_rank=8, dff=128
    ),
    "large": EventConfig(
        d=512, n_heads=4, n_layers=8, window=100, n_seeds=256, n_tokens=32, kron_rank=8, dff=256
    ),
}  # fmt: skip

# The narrower stack of very long histories: two heads of 128, half the tokens, half the window (Kunlun's example has
# impressions at half the width, tokens and window of clicks).
LONG_EVENTS = {
    "base": replace(EVENTS["base"], d=256, n_heads=2, n_layers=4, n_seeds=128, n_tokens=16, window=50),
    "large": replace(EVENTS["large"], d=256, n_heads=2, n_layers=6, n_seeds=128, n_tokens=16, window=50),
}
LONG_FROM = 2049  # up to 2,048 events a history has the full stack


def _block(event: EventConfig) -> EventConfig:
    return replace(event, attention="block")


KUNLUN = {
    "tiny": KunlunConfig(
        d=16, n_layers=2, n_sum=4, rank=4, hidden=(16,), trunk=(16,), tower=8, event=EVENTS["tiny"]
    ),
    "small": KunlunConfig(
        d=64, n_layers=3, n_sum=8, rank=8, hidden=(128,), trunk=(128,), tower=32, event=EVENTS["small"]
    ),
    "base": KunlunConfig(
        d=384, n_heads=3, n_layers=6, n_sum=32, rank=8, hidden=(1024, 512), trunk=(1024, 512), tower=128,
        event=EVENTS["base"], long_event=LONG_EVENTS["base"], long_from=LONG_FROM,
    ),
    "large": KunlunConfig(
        d=512, n_heads=4, n_layers=8, n_sum=32, n_experts=4, rank=16, hidden=(2048, 512), trunk=(1024, 512), tower=128,
        event=EVENTS["large"], long_event=LONG_EVENTS["large"], long_from=LONG_FROM,
    ),
}  # fmt: skip

GEM = {
    name: GEMConfig(
        **{
            **{f: getattr(config, f) for f in config.__dataclass_fields__},
            "event": _block(config.event),
            "long_event": _block(config.long_event) if config.long_event is not None else None,
        }
    )
    for name, config in KUNLUN.items()
}

# The others, at the widths of the same ladder. Published sizes: InterFormer 3 layers of 4 CLS, 2 PMA and 2 recent tokens;
# Wukong rank 8 and MLPs of 1024, 512 (TorchEasyRec's example); HSTU 5 layers of 4 heads of 128 (DLRM-v3); BST 1 layer.
_TINY: dict[str, Any] = {"d": 16, "trunk": (16,), "tower": 8}
_SMALL: dict[str, Any] = {"d": 64, "trunk": (128,), "tower": 32}
_BASE: dict[str, Any] = {"d": 384, "trunk": (1024, 512), "tower": 128}
_LARGE: dict[str, Any] = {"d": 512, "trunk": (1024, 512), "tower": 128}

INTERFORMER = {
    "tiny": InterFormerConfig(**_TINY, n_layers=2, n_sum=2, rank=4, hidden=(16,)),
    "small": InterFormerConfig(**_SMALL, n_layers=3, hidden=(128,)),
    "base": InterFormerConfig(**_BASE, n_heads=3, n_layers=3, hidden=(1024, 512)),
    "large": InterFormerConfig(**_LARGE, n_heads=4, n_layers=4, hidden=(2048, 512)),
}
WUKONG = {
    "tiny": WukongConfig(**_TINY, n_layers=2, rank=4, hidden=(16,)),
    "small": WukongConfig(**_SMALL, n_layers=3, hidden=(128,)),
    "base": WukongConfig(**_BASE, n_layers=6, hidden=(1024, 512)),
    "large": WukongConfig(**_LARGE, n_layers=8, rank=16, hidden=(2048, 1024)),
}
HSTU = {
    "tiny": HSTUConfig(**_TINY, n_layers=2),
    "small": HSTUConfig(**_SMALL, n_layers=3),
    "base": HSTUConfig(**_BASE, n_heads=3, n_layers=5),
    "large": HSTUConfig(**_LARGE, n_heads=4, n_layers=8),
}
BST = {
    "tiny": BSTConfig(**_TINY, d_ffn=32),
    "small": BSTConfig(**_SMALL, n_layers=1, d_ffn=256),
    "base": BSTConfig(**_BASE, n_heads=3, n_layers=2, d_ffn=1536),
    "large": BSTConfig(**_LARGE, n_heads=4, n_layers=3, d_ffn=2048),
}
SASREC = {
    "tiny": SASRecRankerConfig(d=16, d_inner=32),
    "small": SASRecRankerConfig(d=64, n_layers=2, d_inner=256),
    "base": SASRecRankerConfig(d=384, n_heads=3, n_layers=4, d_inner=1536),
    "large": SASRecRankerConfig(d=512, n_heads=4, n_layers=6, d_inner=2048),
}
