"""RecBole's SASRec and BERT4Rec, torch-rechub's HSTU, SASRec, BST and DIN, with their own losses."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .registry import MAX_LEN, Built, ids, register, valid

ITEMS = 61


def _shake(model: nn.Module) -> None:
    """The packages start biases at 0, where a wrong gradient could hide behind symmetry."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.15)


# ---------------------------------------------------------------- RecBole

_RECBOLE: dict[str, Any] = {
    "n_layers": 2, "n_heads": 3, "hidden_size": 24, "inner_size": 40, "hidden_dropout_prob": 0.0, "attn_dropout_prob": 0.0,
    "hidden_act": "gelu", "layer_norm_eps": 1e-12, "initializer_range": 0.02, "loss_type": "CE", "mask_ratio": 0.3,
    "USER_ID_FIELD": "user_id", "ITEM_ID_FIELD": "item_id", "LIST_SUFFIX": "_list", "NEG_PREFIX": "neg_",
    "ITEM_LIST_LENGTH_FIELD": "item_length", "MAX_ITEM_LIST_LENGTH": MAX_LEN, "device": "cpu",
    "MASK_ITEM_SEQ": "mask_seq", "POS_ITEMS": "pos", "NEG_ITEMS": "neg", "MASK_INDEX": "index",
}  # fmt: skip


class _Items:
    """What RecBole's models ask a dataset for."""

    def num(self, field: str) -> int:
        return ITEMS


def _sasrec(loss: str, train: bool = True) -> Built:
    from recbole.model.sequential_recommender.sasrec import SASRec

    torch.manual_seed(0)
    model = SASRec({**_RECBOLE, "loss_type": loss}, _Items())
    _shake(model)

    def step(item_id_list: Tensor, item_length: Tensor, item_id: Tensor, neg_item_id: Tensor) -> Tensor:
        batch = {"item_id_list": item_id_list, "item_length": item_length, "item_id": item_id, "neg_item_id": neg_item_id}
        return model.calculate_loss(batch) if train else model.full_sort_predict(batch)

    def inputs(lengths: Tensor, max_len: int, g: torch.Generator) -> tuple[Tensor, ...]:
        items = torch.randint(1, ITEMS, (2, len(lengths)), generator=g)
        return ids(lengths, max_len, g, ITEMS), lengths.clone(), items[0], items[1]

    return Built(step, inputs, train)


register("recbole", "SASRec, CE", 2, name="recbole-sasrec-ce", quick=True)(lambda: _sasrec("CE"))
register("recbole", "SASRec, BPR", 2, name="recbole-sasrec-bpr")(lambda: _sasrec("BPR"))
register("recbole", "SASRec, full_sort_predict", 2, name="recbole-sasrec-eval", grad=False)(lambda: _sasrec("CE", False))


def _bert4rec(loss: str) -> Built:
    from recbole.model.sequential_recommender.bert4rec import BERT4Rec

    torch.manual_seed(0)
    model = BERT4Rec({**_RECBOLE, "loss_type": loss}, _Items())
    _shake(model)

    def step(mask_seq: Tensor, pos: Tensor, neg: Tensor, index: Tensor) -> Tensor:
        return model.calculate_loss({"mask_seq": mask_seq, "pos": pos, "neg": neg, "index": index})

    def inputs(lengths: Tensor, max_len: int, g: torch.Generator) -> tuple[Tensor, ...]:
        sequence = ids(lengths, max_len, g, ITEMS)
        chosen = (torch.rand(sequence.shape, generator=g) < 0.3) & valid(lengths, max_len)
        chosen[:, 0] = False  # RecBole's index 0 stands for "no masked item"
        width = model.mask_item_length
        index = torch.zeros(len(lengths), width, dtype=torch.int64)
        pos, neg = index.clone(), index.clone()
        for b in range(len(lengths)):
            at = chosen[b].nonzero().flatten()[:width]
            index[b, width - len(at) :] = at
            pos[b, width - len(at) :] = sequence[b, at]
            neg[b, width - len(at) :] = torch.randint(1, ITEMS, (len(at),), generator=g)
            sequence[b, at] = model.mask_token
        if not index.any():  # RecBole divides by the number of masked items
            index[:, -1], pos[:, -1] = max_len - 1, 1
        return sequence, pos, neg, index

    return Built(step, inputs)


register("recbole", "BERT4Rec, CE", 2, name="recbole-bert4rec-ce", lengths=("full", "skewed", "given"))(
    lambda: _bert4rec("CE")
)
register("recbole", "BERT4Rec, BPR", 2, name="recbole-bert4rec-bpr", lengths=("full", "skewed", "given"))(
    lambda: _bert4rec("BPR")
)


# ---------------------------------------------------------------- torch-rechub


def _hstu(times: bool) -> Built:
    from torch_rechub.models.generative.hstu import HSTUModel

    torch.manual_seed(0)
    model = HSTUModel(ITEMS, d_model=24, n_heads=3, n_layers=2, dqk=8, dv=10, max_seq_len=MAX_LEN + 6, dropout=0.0,
                      use_time_embedding=times, num_time_buckets=13)  # fmt: skip
    _shake(model)

    def step(x: Tensor, time_diffs: Tensor, targets: Tensor) -> Tensor:
        logits = model(x, time_diffs if times else None)
        # the package's trainer: cross entropy over every position, PAD ignored
        return F.cross_entropy(logits.view(-1, ITEMS), targets.view(-1), ignore_index=0)

    def inputs(lengths: Tensor, max_len: int, g: torch.Generator) -> tuple[Tensor, ...]:
        mask = valid(lengths, max_len)
        times_ = torch.randint(0, 90_000, mask.shape, generator=g) * mask
        return ids(lengths, max_len, g, ITEMS), times_, ids(lengths, max_len, g, ITEMS)

    return Built(step, inputs)


register("torch_rechub", "HSTUModel", 2, name="rechub-hstu", quick=True)(lambda: _hstu(False))
register("torch_rechub", "HSTUModel with times", 2, name="rechub-hstu-times")(lambda: _hstu(True))


def _rechub_sasrec() -> Built:
    from torch_rechub.basic.features import SequenceFeature
    from torch_rechub.models.matching.sasrec import SASRec

    torch.manual_seed(0)
    features = [
        SequenceFeature(n, ITEMS, embed_dim=24, pooling="concat", shared_with=None if n == "seq" else "seq")
        for n in ("seq", "pos", "neg")
    ]
    model = SASRec(features, max_len=MAX_LEN, dropout_rate=0.0, num_blocks=2, num_heads=3)
    _shake(model)

    def step(seq: Tensor, pos: Tensor, neg: Tensor) -> Tensor:
        positive, negative = model({"seq": seq, "pos": pos, "neg": neg})
        at = (pos != 0).float()
        each = F.softplus(-positive) + F.softplus(negative)
        return (each * at).sum() / at.sum()

    def inputs(lengths: Tensor, max_len: int, g: torch.Generator) -> tuple[Tensor, ...]:
        return tuple(ids(lengths, max_len, g, ITEMS) for _ in range(3))

    return Built(step, inputs)


register("torch_rechub", "SASRec", 2, name="rechub-sasrec")(_rechub_sasrec)


def _rechub_ranking(kind: str) -> Built:
    from torch_rechub.basic.features import SequenceFeature, SparseFeature
    from torch_rechub.models.ranking.bst import BST
    from torch_rechub.models.ranking.din import DIN

    torch.manual_seed(0)
    features = [SparseFeature("user", 17, embed_dim=9)]
    history = [SequenceFeature("hist", ITEMS, embed_dim=24, pooling="concat", shared_with="target")]
    target = [SparseFeature("target", ITEMS, embed_dim=24)]
    mlp = {"dims": [20], "dropout": 0.0}
    if kind == "bst":
        mlp["activation"] = "relu"
        model: nn.Module = BST(features, history, target, mlp, nhead=3, dropout=0.0, num_layers=2, max_seq_len=MAX_LEN + 3)
    else:
        model = DIN(features, history, target, mlp, {"dims": [12], "activation": "sigmoid"})
    _shake(model)

    def step(user: Tensor, hist: Tensor, item: Tensor, click: Tensor) -> Tensor:
        return F.binary_cross_entropy(model({"user": user, "hist": hist, "target": item}), click)

    def inputs(lengths: Tensor, max_len: int, g: torch.Generator) -> tuple[Tensor, ...]:
        size = (len(lengths),)
        user, item = torch.randint(0, 17, size, generator=g), torch.randint(1, ITEMS, size, generator=g)
        return user, ids(lengths, max_len, g, ITEMS), item, torch.randint(0, 2, size, generator=g).float()

    return Built(step, inputs)


register("torch_rechub", "BST", 2, name="rechub-bst")(lambda: _rechub_ranking("bst"))
register("torch_rechub", "DIN", 0, pools=1, name="rechub-din", reads="all", note="the model masks nothing: padding counts")(
    lambda: _rechub_ranking("din")
)
