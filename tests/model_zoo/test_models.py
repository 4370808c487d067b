"""The models in eager: a sample's result depends on nothing but the sample."""

import numpy as np
import pytest
import torch

from gemopt.model_zoo import GEMSmall, GEMSmallConfig, SASRec, SASRecConfig

VOCABULARY = {
    "user_id": 20, "user_age": 4, "user_gender": 3, "user_occupation": 5, "item_id": 50, "item_year": 6,
    "genre": 7, "gap": 8,
}  # fmt: skip
HISTORIES = ("liked", "disliked")


def ragged_batch(lengths: dict[str, list[int]], width: dict[str, int], seed: int = 0) -> dict[str, torch.Tensor]:
    """A batch whose events depend on the seed, the history and the sample alone, not on the padded width."""
    n = len(next(iter(lengths.values())))
    rng = np.random.default_rng(seed)
    batch = {k: torch.from_numpy(rng.integers(1, VOCABULARY[k], n)) for k in VOCABULARY if k not in ("genre", "gap")}
    genres = rng.integers(0, VOCABULARY["genre"], (n, 3))
    batch["item_genres"] = torch.from_numpy(np.where(np.arange(3) < 1 + genres[:, :1] % 3, np.maximum(genres, 1), 0))
    for name, history in lengths.items():
        real = np.arange(width[name]) < np.array(history)[:, None]
        for key, size in (("item", "item_id"), ("genre", "genre"), ("gap", "gap")):
            events = np.random.default_rng([seed, len(key), len(name)]).integers(1, VOCABULARY[size], (n, 64))
            batch[f"{name}_{key}"] = torch.from_numpy(events[:, : width[name]] * real)
        batch[f"{name}_length"] = torch.tensor(history)
    return batch


def make(pooling: str, **options) -> GEMSmall:
    torch.manual_seed(0)
    config = GEMSmallConfig(VOCABULARY, HISTORIES, max_len=64, d_model=16, d_ffn=32, pooling=pooling, **options)
    return GEMSmall(config).double()


LENGTHS = {"liked": [3, 0, 7, 1], "disliked": [0, 0, 5, 2]}


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_gem_small_ignores_padding_and_neighbours(pooling):
    model = make(pooling)
    narrow = ragged_batch(LENGTHS, {"liked": 7, "disliked": 5})
    wide = ragged_batch(LENGTHS, {"liked": 64, "disliked": 9})
    out = model(narrow)
    assert out.shape == (4,) and out.dtype == torch.float64
    torch.testing.assert_close(model(wide), out, rtol=1e-12, atol=1e-12)
    for i in range(4):
        alone = {k: v[i : i + 1] for k, v in wide.items()}
        torch.testing.assert_close(model(alone), out[i : i + 1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_gem_small_gradients_ignore_padding(pooling):
    grads = []
    for width in ({"liked": 7, "disliked": 5}, {"liked": 30, "disliked": 64}):
        model = make(pooling)
        model(ragged_batch(LENGTHS, width)).square().sum().backward()
        grads.append([p.grad for p in model.parameters()])
        assert all(g is not None and g.isfinite().all() for g in grads[-1])
    for narrow, wide in zip(*grads, strict=True):
        torch.testing.assert_close(wide, narrow, rtol=1e-9, atol=1e-12)


def test_gem_small_uses_every_input():
    model, batch = make("mean"), ragged_batch(LENGTHS, {"liked": 7, "disliked": 5})
    out = model(batch)
    for name, value in batch.items():
        changed = dict(batch)
        changed[name] = torch.where(value > 1, value - 1, value)
        changed[name] = changed[name] if not torch.equal(changed[name], value) else torch.where(value > 0, 2, 0)
        assert not torch.equal(model(changed), out), name


def test_gem_small_empty_batch_and_dropout():
    model = make("mean", dropout=0.5)
    empty = ragged_batch({"liked": [], "disliked": []}, {"liked": 3, "disliked": 3})
    assert model(empty).shape == (0,)
    batch = ragged_batch(LENGTHS, {"liked": 7, "disliked": 5})
    assert not torch.equal(model(batch), model(batch))
    model.eval()
    assert torch.equal(model(batch), model(batch))


@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("attention", ["softmax", "sdpa"])
def test_sasrec_ignores_padding_and_neighbours(pooling, attention):
    torch.manual_seed(0)
    config = SASRecConfig(50, max_len=32, d_model=16, d_inner=32, pooling=pooling, attention=attention)
    model = SASRec(config).double()
    lengths = torch.tensor([4, 0, 1, 9])
    items = torch.randint(1, 50, (4, 32)) * (torch.arange(32) < lengths[:, None])
    out = model(items[:, :9], lengths)
    assert out.shape == (4, 50) and out.isfinite().all()
    torch.testing.assert_close(model(items, lengths), out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model(items[3:], lengths[3:]), out[3:], rtol=1e-12, atol=1e-12)
    out.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_sasrec_spellings_agree_and_are_causal():
    models = []
    for attention in ("softmax", "sdpa"):
        torch.manual_seed(0)
        models.append(SASRec(SASRecConfig(50, max_len=8, d_model=16, d_inner=32, attention=attention)).double())
    items, lengths = torch.randint(1, 50, (3, 8)), torch.tensor([8, 5, 2])
    torch.testing.assert_close(models[0](items, lengths), models[1](items, lengths), rtol=1e-12, atol=1e-12)
    prefix = models[0](items, torch.tensor([5, 5, 2]))
    torch.testing.assert_close(prefix[:1], models[0](items[:1, :5], torch.tensor([5])), rtol=1e-12, atol=1e-12)


def test_bad_configs_are_named():
    with pytest.raises(ValueError, match="pooling"):
        GEMSmallConfig(VOCABULARY, pooling="max")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="d_model"):
        SASRecConfig(10, d_model=10, n_heads=3)
    with pytest.raises(ValueError, match="attention"):
        SASRecConfig(10, attention="flash")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="histories"):
        GEMSmallConfig(VOCABULARY, histories=())
