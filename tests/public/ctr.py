"""CTR packages: FuxiCTR's DIN and TransAct (a BST-like transformer over history and target), DeepCTR-Torch's DIN."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
import tempfile
from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .recsys import ITEMS, _shake
from .registry import Built, ids, register

# ---------------------------------------------------------------- FuxiCTR


def _fuxictr_class(path: str, name: str) -> Any:
    """A class of the model zoo that FuxiCTR's wheel installs as a top-level `model_zoo`, whatever else has that name."""
    file = importlib.metadata.distribution("fuxictr").locate_file(path)
    key = f"_fuxictr_{name}"
    spec = importlib.util.spec_from_file_location(key, str(file))
    assert spec is not None and spec.loader is not None
    if key not in sys.modules:
        sys.modules[key] = importlib.util.module_from_spec(spec)  # Dynamo looks the globals of a frame up by this name
        spec.loader.exec_module(sys.modules[key])
    return getattr(sys.modules[key], name)


def _feature_map() -> Any:
    from fuxictr.features import FeatureMap

    features = FeatureMap("tiny", ".")
    features.features = OrderedDict(
        user={"type": "categorical", "vocab_size": 17, "source": "user"},
        item={"type": "categorical", "vocab_size": ITEMS, "source": "item", "padding_idx": 0},
    )
    features.labels = ["click"]
    features.num_fields = 2
    features.default_emb_dim = 24
    return features


def _fuxictr(path: str, name: str, **options: Any) -> Built:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as root:
        model: nn.Module = _fuxictr_class(path, name)(
            _feature_map(), embedding_dim=24, optimizer="adam", loss="binary_cross_entropy", metrics=["AUC"], verbose=0,
            model_root=root, **options,
        )  # fmt: skip
    _shake(model)

    def step(user: Tensor, items: Tensor, mask: Tensor, click: Tensor) -> Tensor:
        batch = ({"user": user, "click": click}, {"item": items.flatten()}, mask)
        return model.compute_loss(model(batch), model.get_labels(batch))  # type: ignore[operator]

    def inputs(lengths: Tensor, max_len: int, g: torch.Generator) -> tuple[Tensor, ...]:
        size = (len(lengths),)
        history = ids(lengths, max_len, g, ITEMS).flip(1)  # FuxiCTR pads on the left
        target = torch.randint(1, ITEMS, (len(lengths), 1), generator=g)
        click = torch.randint(0, 2, size, generator=g).float()
        return torch.randint(0, 17, size, generator=g), torch.cat([history, target], 1), (history != 0).float(), click

    return Built(step, inputs)


_DIN, _TRANSACT = "model_zoo/LongCTR/DIN/DIN.py", "model_zoo/LongCTR/TransAct/TransAct.py"


@register("fuxictr", "DIN", 0, pools=1, name="fuxictr-din")
def _din() -> Built:
    return _fuxictr(_DIN, "DIN", dnn_hidden_units=[20], attention_hidden_units=[12], attention_hidden_activations="ReLU")


@register("fuxictr", "DIN, softmax", 0, pools=1, name="fuxictr-din-softmax")
def _din_softmax() -> Built:
    return _fuxictr(
        _DIN, "DIN", dnn_hidden_units=[20], attention_hidden_units=[12], attention_hidden_activations="ReLU",
        din_use_softmax=True,
    )  # fmt: skip


@register("fuxictr", "TransAct", 2, name="fuxictr-transact")
def _transact() -> Built:
    return _fuxictr(
        _TRANSACT, "TransAct", dcn_cross_layers=1, dcn_hidden_units=[20], mlp_hidden_units=[10], num_heads=3,
        transformer_layers=2, dim_feedforward=40,
    )  # fmt: skip


@register("fuxictr", "MultiHeadTargetAttention", 1, name="fuxictr-target", quick=True)
def _target_attention() -> Built:
    from fuxictr.pytorch.layers import MLP_Block, MultiHeadTargetAttention

    torch.manual_seed(0)
    table = nn.Embedding(ITEMS, 24, padding_idx=0)
    attention = MultiHeadTargetAttention(24, 30, num_heads=3)
    head = MLP_Block(48, output_dim=1, hidden_units=[20], output_activation="Sigmoid")
    _shake(nn.ModuleList([table, attention, head]))

    def step(items: Tensor, target: Tensor, click: Tensor) -> Tensor:
        wanted = table(target)
        interest = attention(wanted, table(items), mask=(items != 0).float())
        return F.binary_cross_entropy(head(torch.cat([wanted, interest], -1)).squeeze(1), click)

    def inputs(lengths: Tensor, max_len: int, g: torch.Generator) -> tuple[Tensor, ...]:
        size = (len(lengths),)
        target = torch.randint(1, ITEMS, size, generator=g)
        return ids(lengths, max_len, g, ITEMS), target, torch.randint(0, 2, size, generator=g).float()

    return Built(step, inputs)


# ---------------------------------------------------------------- DeepCTR-Torch


def _deepctr_din(softmax: bool) -> Built:
    import io
    from contextlib import redirect_stdout

    from deepctr_torch.inputs import SparseFeat, VarLenSparseFeat
    from deepctr_torch.models.din import DIN

    from .registry import MAX_LEN

    torch.manual_seed(0)
    columns = [
        SparseFeat("user", 17, embedding_dim=9),
        SparseFeat("item", ITEMS, embedding_dim=24),
        VarLenSparseFeat(SparseFeat("hist_item", ITEMS, embedding_dim=24, embedding_name="item"), MAX_LEN,
                         length_name="length"),
    ]  # fmt: skip
    with redirect_stdout(io.StringIO()):
        model = DIN(columns, ["item"], dnn_hidden_units=(20,), att_hidden_size=(12,), att_activation="sigmoid",
                    att_weight_normalization=softmax, l2_reg_embedding=0.0)  # fmt: skip
    _shake(model)

    def step(x: Tensor, click: Tensor) -> Tensor:
        return F.binary_cross_entropy(model(x).squeeze(1), click)

    def inputs(lengths: Tensor, max_len: int, g: torch.Generator) -> tuple[Tensor, ...]:
        size = (len(lengths), 1)
        user, item = torch.randint(0, 17, size, generator=g), torch.randint(1, ITEMS, size, generator=g)
        history = ids(lengths, max_len, g, ITEMS)
        x = torch.cat([user, item, history, lengths[:, None]], 1).float()  # DeepCTR takes one float matrix
        return x, torch.randint(0, 2, size[:1], generator=g).float()

    return Built(step, inputs)


register("deepctr_torch", "DIN", 0, pools=1, name="deepctr-din")(lambda: _deepctr_din(False))
register("deepctr_torch", "DIN, normalised weights", 0, pools=1, name="deepctr-din-softmax")(lambda: _deepctr_din(True))
