"""transformers: BERT, DistilBERT, GPT-2, Llama and T5 from their configurations, with their own losses."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .registry import MAX_LEN, Built, PublicCase, file, ids, labels, valid

VOCAB = 59
_BERT = {
    "vocab_size": VOCAB, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 40,
    "max_position_embeddings": 32, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 4,
    "classifier_dropout": 0.0,
}  # fmt: skip
_DISTIL = {
    "vocab_size": VOCAB, "dim": 24, "n_layers": 2, "n_heads": 3, "hidden_dim": 40, "max_position_embeddings": 32,
    "dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0, "num_labels": 4,
}  # fmt: skip
_GPT2 = {
    "vocab_size": VOCAB, "n_embd": 24, "n_layer": 2, "n_head": 3, "n_inner": 40, "n_positions": 32, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0, "attn_pdrop": 0.0, "summary_first_dropout": 0.0, "use_cache": False, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_LLAMA = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 40, "max_position_embeddings": 36, "use_cache": False, "pad_token_id": 0, "attention_dropout": 0.0,
}  # fmt: skip
_T5 = {
    "vocab_size": VOCAB, "d_model": 24, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 3,
    "relative_attention_num_buckets": 9, "relative_attention_max_distance": 20, "dropout_rate": 0.0,
    "classifier_dropout": 0.0, "use_cache": False, "pad_token_id": 0, "decoder_start_token_id": 0,
}  # fmt: skip


def _model(name: str, config: str, options: dict[str, Any], attention: str) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    made = getattr(transformers, config)(**options)
    made._attn_implementation = attention
    model: nn.Module = getattr(transformers, name)(made)
    with torch.no_grad():  # the packages start biases at 0: a wrong bias gradient would hide behind symmetry
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.15)
    return model


def _masked_lm(name: str, config: str, options: dict[str, Any], attention: str) -> Built:
    model = _model(name, config, options, attention)

    def step(input_ids: Tensor, attention_mask: Tensor, targets: Tensor) -> Tensor:
        return model(input_ids=input_ids, attention_mask=attention_mask, labels=targets).loss

    def inputs(lengths: Tensor, max_len: int, g: torch.Generator) -> tuple[Tensor, ...]:
        mask = valid(lengths, max_len)
        at = (torch.rand(mask.shape, generator=g) < 0.4) & mask
        at[:, 0] = mask[:, 0]  # a batch without a target has no loss
        return ids(lengths, max_len, g, VOCAB), mask.long(), labels(at, g, VOCAB)

    return Built(step, inputs)


def _causal_lm(name: str, config: str, options: dict[str, Any], attention: str, loss_type: str = "") -> Built:
    model = _model(name, config, options, attention)
    if loss_type:
        model.loss_type = loss_type

    def step(input_ids: Tensor, attention_mask: Tensor, targets: Tensor) -> Tensor:
        return model(input_ids=input_ids, attention_mask=attention_mask, labels=targets).loss

    def inputs(lengths: Tensor, max_len: int, g: torch.Generator) -> tuple[Tensor, ...]:
        mask = valid(lengths, max_len)
        input_ids = ids(lengths, max_len, g, VOCAB)
        return input_ids, mask.long(), input_ids.masked_fill(~mask, -100)

    return Built(step, inputs)


def _classifier(name: str, config: str, options: dict[str, Any], attention: str, train: bool = True) -> Built:
    model = _model(name, config, options, attention)

    def step(input_ids: Tensor, attention_mask: Tensor, targets: Tensor) -> Any:
        out = model(input_ids=input_ids, attention_mask=attention_mask, labels=targets)
        return out.loss if train else (out.loss, out.logits)

    def inputs(lengths: Tensor, max_len: int, g: torch.Generator) -> tuple[Tensor, ...]:
        targets = torch.randint(0, model.config.num_labels, (len(lengths),), generator=g)
        return ids(lengths, max_len, g, VOCAB), valid(lengths, max_len).long(), targets

    return Built(step, inputs, train)


def _hidden(name: str, config: str, options: dict[str, Any], attention: str) -> Built:
    model = _model(name, config, options, attention)

    def step(input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state

    def inputs(lengths: Tensor, max_len: int, g: torch.Generator) -> tuple[Tensor, ...]:
        return ids(lengths, max_len, g, VOCAB), valid(lengths, max_len).long()

    return Built(step, inputs)


def _seq2seq(attention: str) -> Built:
    model = _model("T5ForConditionalGeneration", "T5Config", _T5, attention)

    def step(input_ids: Tensor, attention_mask: Tensor, targets: Tensor) -> Tensor:
        return model(input_ids=input_ids, attention_mask=attention_mask, labels=targets).loss

    def inputs(lengths: Tensor, max_len: int, g: torch.Generator) -> tuple[Tensor, ...]:
        mask = valid(lengths, max_len)
        answer = valid((lengths + 1) // 2, max(1, max_len - 4))
        return ids(lengths, max_len, g, VOCAB), mask.long(), labels(answer, g, VOCAB)

    return Built(step, inputs)


#: One of each kind of mask and score is enough where time is short.
_QUICK = ("bert-mlm-eager", "llama-lm-eager", "gpt2-cls-sdpa")


def _file(name: str, model: str, sites: int, make: Any, **options: Any) -> None:
    for attention in ("sdpa", "eager"):
        options["quick"] = f"{name}-{attention}" in _QUICK
        file(PublicCase(f"{name}-{attention}", "transformers", f"{model}, {attention}", partial(make, attention=attention),
                        sites, **options))  # fmt: skip


_file("bert-mlm", "BertForMaskedLM", 2, partial(_masked_lm, "BertForMaskedLM", "BertConfig", _BERT))
_file("bert-cls", "BertForSequenceClassification", 2,
      partial(_classifier, "BertForSequenceClassification", "BertConfig", _BERT))  # fmt: skip
_file("bert-cls-eval", "BertForSequenceClassification, eval", 2,
      partial(_classifier, "BertForSequenceClassification", "BertConfig", _BERT, train=False), grad=False)  # fmt: skip
_file("bert-hidden", "BertModel, hidden states", 2, partial(_hidden, "BertModel", "BertConfig", _BERT), reads="all")
_file("distilbert-mlm", "DistilBertForMaskedLM", 2,
      partial(_masked_lm, "DistilBertForMaskedLM", "DistilBertConfig", _DISTIL))  # fmt: skip
_file("distilbert-cls", "DistilBertForSequenceClassification", 2,
      partial(_classifier, "DistilBertForSequenceClassification", "DistilBertConfig", _DISTIL))  # fmt: skip
_file("gpt2-lm", "GPT2LMHeadModel", 2,
      partial(_causal_lm, "GPT2LMHeadModel", "GPT2Config", _GPT2, loss_type="ForCausalLM"))  # fmt: skip
# GPT2LMHeadModel itself names no loss_type: transformers logs a warning inside the loss, Dynamo breaks the graph before it,
# and the model's own graph returns its logits with their padding.
_file("gpt2-lm-break", "GPT2LMHeadModel, loss_type left out", 2,
      partial(_causal_lm, "GPT2LMHeadModel", "GPT2Config", _GPT2), reads="all",
      note="a warning inside the loss breaks the graph: the model's own graph returns padded logits")  # fmt: skip
_file("gpt2-cls", "GPT2ForSequenceClassification", 2,
      partial(_classifier, "GPT2ForSequenceClassification", "GPT2Config", {**_GPT2, "num_labels": 4}))  # fmt: skip
_file("gpt2-hidden", "GPT2Model, hidden states", 2, partial(_hidden, "GPT2Model", "GPT2Config", _GPT2), reads="all")
_file("llama-lm", "LlamaForCausalLM, 4 heads on 2", 2, partial(_causal_lm, "LlamaForCausalLM", "LlamaConfig", _LLAMA))
_file("llama-lm-eval", "LlamaForCausalLM, eval", 2,
      partial(_causal_lm, "LlamaForCausalLM", "LlamaConfig", _LLAMA), grad=False)  # fmt: skip
_file("t5", "T5ForConditionalGeneration", 6, _seq2seq)

assert MAX_LEN < 32
