"""The same encoder in different spellings: one choice changes at a time, then a few mixtures."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .parts import SequenceModel
from .registry import Expected, Make, ids_and_lengths, register


def _maker(**choices: object) -> Make:
    def make(seed: int):
        torch.manual_seed(seed)
        return SequenceModel(**choices), ids_and_lengths  # type: ignore[arg-type]

    return make


def _file(name: str, expected: Expected, why: str, *tags: str, **choices: object) -> None:
    register(expected, why, *tags, name=name)(_maker(**choices))


# the end of the model
_file("last_gather", "rewritten", "gather at length - 1", "pool", pool="last_gather", layers=2)
_file("last_index", "rewritten", "advanced index at length - 1", "pool", pool="last_index")
_file("last_one_hot", "rewritten", "sum with a one-hot of length - 1", "pool", pool="last_one_hot")
_file("last_counted", "rewritten", "last position counted from the mask", "pool", pool="last_counted")
_file("masked_mean", "rewritten", "mean over valid rows", "pool", pool="mean", layers=2)
_file("mean_by_length", "rewritten", "divides by the length as given: 0 / 0 stays", "pool", pool="mean_lengths")
_file("sum_where", "rewritten", "sum of where(mask, x, 0)", "pool", pool="sum_where")
_file("sum_bmm", "rewritten", "masked sum as a matrix product", "pool", pool="sum_bmm")
_file("masked_max", "rewritten", "max over rows filled with -1e9", "pool", pool="max")
_file("first_token", "rewritten", "one row per sequence, the first", "pool", pool="first")
_file("plain_mean", "refused", "a mean over padding reads every row", "pool", "refused", pool="plain_mean")
_file("padded_hidden", "refused", "returns its padded hidden states", "pool", "refused", pool="none")

# where the mask comes from
_file("valid_lengths_gt", "rewritten", "lengths > arange", "mask", valid="lengths_gt")
_file("valid_not_ge", "rewritten", "complement of arange >= lengths", "mask", valid="not_ge")
_file("valid_le", "rewritten", "arange <= length - 1", "mask", valid="le_minus_one", pool="last_gather")
_file("valid_expand", "rewritten", "both sides expanded first", "mask", valid="expand_lt")
_file("valid_ids_ne", "rewritten", "ids != 0", "mask", "ids", valid="ids_ne")
_file("valid_ids_gt", "rewritten", "ids > 0", "mask", "ids", valid="ids_gt", pool="sum_where")
_file("valid_ids_bool", "rewritten", "ids.bool()", "mask", "ids", valid="ids_bool")
_file("valid_ids_not_eq", "rewritten", "logical_not(ids == 0)", "mask", "ids", valid="ids_not_eq")
_file(
    "mask_ids_gather_length",
    "any",
    "mask from ids, row from lengths: not provably the same",
    "mask",
    "ids",
    "two_sources",
    valid="ids_ne",
    pool="last_gather",
    causal="tril",
)

# causality
_file("causal_tril", "rewritten", "tril of ones", "causal", causal="tril", pool="last_gather", layers=2)
_file("causal_triu", "rewritten", "complement of triu", "causal", causal="not_triu", pool="last_index")
_file("causal_triu_eq", "rewritten", "triu == 0", "causal", causal="triu_eq_0", pool="last_gather")
_file("causal_arange", "rewritten", "positions compared", "causal", causal="arange")

# how the mask reaches the scores
_file("fill_finfo", "rewritten", "finfo.min", "fill", fill="finfo_min")
_file("fill_1e9", "rewritten", "-1e9 where mask == 0", "fill", fill="1e9")
_file("fill_where_inf", "rewritten", "where with a 0-d -inf", "fill", fill="where_inf")
_file("fill_where_1e9", "rewritten", "where with the SASRec constant", "fill", fill="where_1e9", causal="tril")
_file(
    "fill_additive_1e4",
    "rewritten",
    "BERT's (1 - m) * -1e4: an assumption on scores",
    "fill",
    fill="additive_1e4",
)
_file("fill_additive_finfo", "rewritten", "(1 - m) * finfo.min", "fill", fill="additive_finfo")
_file("fill_additive_inf", "rewritten", "adds zeros filled with -inf", "fill", fill="additive_inf")
_file("fill_inplace", "rewritten", "masked_fill_ on the scores", "fill", "inplace", fill="inplace")

# how the products are contracted
_file("attend_scale_first", "rewritten", "scale on Q, permuted K", "attend", attend="scale_first")
_file("attend_single_bmm", "rewritten", "three axes, one head", "attend", attend="single_bmm")
_file("attend_merged_bmm", "rewritten", "heads merged in the batch axis", "attend", attend="merged_bmm")
_file(
    "attend_cat_heads",
    "rewritten",
    "heads by split and cat on batch",
    "attend",
    attend="cat_heads",
    causal="tril",
)
_file("attend_einsum", "rewritten", "einsum", "attend", attend="einsum")
_file("attend_mul_sum", "any", "broadcast multiply and sum", "attend", attend="mul_sum")
_file("attend_exp_sum", "any", "softmax by hand, with epsilon", "attend", attend="exp_sum")
_file("sdpa_bool", "rewritten", "SDPA with a bool mask", "attend", "sdpa", attend="sdpa_bool")
_file(
    "sdpa_bool_causal",
    "rewritten",
    "SDPA, bool mask & causal",
    "attend",
    "sdpa",
    attend="sdpa_bool",
    causal="tril",
    pool="last_gather",
)
_file("sdpa_float", "rewritten", "SDPA with a float mask", "attend", "sdpa", attend="sdpa_float")
_file(
    "sdpa_is_causal",
    "rewritten",
    "is_causal, no padding mask at all",
    "attend",
    "sdpa",
    attend="sdpa_is_causal",
    pool="last_gather",
)

# norms and positions
_file("post_norm", "rewritten", "post-norm", "norm", pre_norm=False)
_file("no_position", "rewritten", "no positional term", "position", position="none")
_file("parameter_position", "rewritten", "a sliced parameter and a scale", "position", position="parameter")
_file("sinusoidal_position", "rewritten", "a sliced buffer", "position", position="sinusoidal")

# mixtures
_file(
    "sasrec",
    "rewritten",
    "SASRec as published",
    "mixture",
    valid="ids_ne",
    causal="tril",
    fill="where_1e9",
    attend="cat_heads",
    pool="last_one_hot",
    position="learned",
    pre_norm=False,
    layers=2,
)
_file(
    "bert4rec",
    "rewritten",
    "BERT4Rec as published",
    "mixture",
    valid="ids_gt",
    fill="additive_1e4",
    attend="matmul",
    pool="mean",
    position="parameter",
    pre_norm=False,
    layers=2,
)
_file(
    "gpt_like",
    "rewritten",
    "pre-norm, causal, SDPA",
    "mixture",
    causal="arange",
    attend="sdpa_bool",
    pool="last_index",
    position="parameter",
    layers=2,
)


class WeightsMaskedAfterSoftmax(nn.Module):
    """Multiplies by the mask after the softmax: padded keys count in the denominator."""

    def __init__(self, renormalise: bool) -> None:
        super().__init__()
        self.body = SequenceModel(layers=0, pool="none")
        self.q, self.k = nn.Linear(16, 16), nn.Linear(16, 16)
        self.renormalise = renormalise

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        x = self.body(ids, lengths)
        keep = (torch.arange(ids.size(1), device=ids.device) < lengths[:, None]).to(x.dtype)
        weights = torch.softmax(self.q(x) @ self.k(x).transpose(1, 2) / 4.0, dim=-1) * keep[:, None, :]
        if self.renormalise:
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-6)
        return ((weights @ x) * keep[..., None]).sum(1)


@register("any", "mask after the softmax: padded keys are observed through the denominator", "near_miss")
def mask_after_softmax(seed: int):
    torch.manual_seed(seed)
    return WeightsMaskedAfterSoftmax(renormalise=False), ids_and_lengths


@register(
    "any",
    "mask after the softmax, then renormalised: equal to a masked softmax but for rounding",
    "near_miss",
)
def mask_after_softmax_renormalised(seed: int):
    torch.manual_seed(seed)
    return WeightsMaskedAfterSoftmax(renormalise=True), ids_and_lengths
