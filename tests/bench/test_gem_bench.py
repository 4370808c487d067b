"""bench/gem.py and bench/quality.py on tiny models, with the compilers left out."""

import importlib
import json
import weakref
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).resolve().parents[2] / "bench"


class Report:
    rewrites = rejections = ()
    steps_packed, steps_padded = 5, {}


@pytest.fixture
def load(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCH))

    def loaded(name):
        module = importlib.import_module(name)
        monkeypatch.setattr(module._harness, "RESULTS", tmp_path)
        return module

    return loaded


@pytest.fixture
def gem(load, monkeypatch):
    """The bench itself without waiting for a compiler or a count."""
    gem = load("gem")

    def compiled(module, mode, /, dynamic=None, **options):
        assert mode == "gemopt" or "recipe" not in options
        module.report = Report()
        return module

    monkeypatch.setattr(gem.tasks, "compiled", compiled)
    monkeypatch.setattr(gem, "useful_flops", lambda module, batches, bf16: (3e9, 1e10, []))
    monkeypatch.setattr(gem.mfu, "matmul_ceiling", lambda device, dtype: 1e12)
    return gem


ARGUMENTS = ["--config", "tiny", "--max-len", "8", "--batch", "4", "--steps", "2", "--contestants", "compile", "gemopt-room"]


def test_command_writes_figures_and_a_plot(gem, tmp_path, capsys):
    assert gem.main([*ARGUMENTS, "--profile", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("gem-*.json")
    (record,) = json.loads(path.read_text())["records"]
    assert set(record["timing"]) == {"compile", "gemopt-room"} and record["failed"] == {}
    assert record["largest_loss_difference"] == 0.0, "same parameters and batches, so the same losses"
    row = record["timing"]["gemopt-room"]
    assert row["useful_tflops"] == pytest.approx(3e9 / row["median_s"] / 1e12)
    assert row["mfu"] == {"matmul": pytest.approx(row["useful_tflops"])} and row["samples_per_s"] > 0
    assert "matrix products" in row["breakdown_s"] and "optimizer" in row["breakdown_s"]
    assert path.with_suffix(".png").stat().st_size > 10_000
    assert 0.2 < record["padding"] < 0.8 and row["packed"] == 5
    assert "gem tiny, batch 4" in " ".join(capsys.readouterr().out.split())


def test_one_that_does_not_fit_is_recorded_and_the_batch_halved(gem, monkeypatch, tmp_path):
    step = gem.Contestant.__call__

    def limited(self, i):
        if len(self.batches[0]["domain"]) > 2:
            raise torch.cuda.OutOfMemoryError("too large")
        step(self, i)

    monkeypatch.setattr(gem.Contestant, "__call__", limited)
    assert gem.main([*ARGUMENTS, "--fit", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("gem-*.json")
    first, second = json.loads(path.read_text())["records"]
    assert first["failed"] == dict.fromkeys(("compile", "gemopt-room"), "out of memory") and "timing" not in first
    assert second["config"]["batch"] == 2 and set(second["timing"]) == {"compile", "gemopt-room"}


def fields(record):
    return {k: fields(v) for k, v in record.items()} if isinstance(record, dict) else None


def test_in_turns_and_apart_give_the_same_fields(gem, tmp_path):
    """And the losses outlive the contestants."""
    records = {}
    for flags in ((), ("--apart",)):
        assert gem.main([*ARGUMENTS, *flags, "--out", str(tmp_path)]) == 0
        (path,) = tmp_path.glob("gem-*.json")
        (records[flags],) = json.loads(path.read_text())["records"]
    turns, apart = records.values()
    assert fields(turns) == fields(apart) and list(turns["timing"]) == list(apart["timing"])
    assert (turns["timed"], turns["apart_because"]) == ("in turns", None)
    assert (apart["timed"], apart["apart_because"]) == ("apart", "asked for")
    assert apart["largest_loss_difference"] == 0.0


def test_contestants_that_do_not_fit_together_are_timed_apart(gem, monkeypatch, tmp_path):
    """The second runs out of memory beside the first. Each is then alone, and what is known is written at once."""
    alive, together, saved = weakref.WeakSet(), [], []
    step, write = gem.Contestant.__call__, gem._harness.record_results

    def limited(self, i):
        alive.add(self)
        together.append(len(alive))
        if len(alive) > 1:
            raise RuntimeError("the compiler failed") from torch.cuda.OutOfMemoryError("too large")
        step(self, i)

    def written(bench, records, device):
        saved.append([sorted(record["timing"]) for record in records])
        return write(bench, records, device)

    monkeypatch.setattr(gem.Contestant, "__call__", limited)
    monkeypatch.setattr(gem._harness, "record_results", written)
    assert gem.main([*ARGUMENTS, "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("gem-*.json")
    (record,) = json.loads(path.read_text())["records"]
    assert record["failed"] == {} and set(record["timing"]) == {"compile", "gemopt-room"}
    assert (record["timed"], record["apart_because"]) == ("apart", "gemopt-room ran out of memory beside others")
    assert record["largest_loss_difference"] == 0.0 and together.count(2) == 1 and not alive
    assert saved[0] == [["compile"]] and saved[-1] == [["compile", "gemopt-room"]]


def test_other_errors_are_not_taken_for_a_lack_of_memory(gem, monkeypatch):
    monkeypatch.setattr(gem.Contestant, "__call__", lambda self, i: torch.zeros(2) @ torch.zeros(3))
    with pytest.raises(RuntimeError, match="size"):
        gem.main([*ARGUMENTS, "--no-save"])
    assert gem.out_of_memory(RuntimeError("CUDA error: out of memory"))


@pytest.mark.parametrize("fill", [0.2, 0.5, 0.7, 1.0])
def test_lengths_have_the_fill(gem, fill):
    config = gem.Config("gem", "tiny", "tiny", 50, 2000, fill, "fp32")
    _, schema = gem.make_work(config)
    batch = gem.random_batch(schema, 2000, fill, torch.Generator().manual_seed(0))
    for event in schema.events:
        length = batch[f"{event}_length"]
        assert length.float().mean() == pytest.approx(50 * fill, abs=0.8) and length.min() >= 1 and length.max() <= 50
        real = torch.arange(50) < length[:, None]
        assert torch.equal(batch[f"{event}_item"] > 0, real)
        age = batch[f"{event}_age"]
        assert (age[:, :-1] >= age[:, 1:])[real[:, 1:]].all() and (age[~real] == 0).all()


def test_grid(gem):
    def titles(*arguments):
        return [c.title() for c in gem.grid(gem.parser().parse_args(arguments))]

    assert titles() == ["gem small, batch 32, max 256, fill 0.5, fp32"]
    assert titles("--device", "cuda")[0] == "gem base, batch 1024, max 1024, fill 0.5, bf16"
    assert len(titles("--device", "cuda")) == 4


def test_families(gem):
    family = gem._breakdown.family
    assert family("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n") == "matrix products"
    assert family("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNT") == "matrix products"
    assert family("void at::native::vectorized_layer_norm_kernel<float>") == "norms"
    assert family("pytorch_flash::flash_fwd_kernel<Traits>") == "attention"
    assert family("triton_poi_fused_add_mul_3") == "fused pointwise"
    assert family("triton_per_fused_native_layer_norm_2") == "norms"
    assert family("triton_red_fused_sum_0") == "softmax and sums"
    assert family("void at::native::(anonymous namespace)::multi_tensor_apply_kernel") == "optimizer"
    assert family("void at::native::indexSelectLargeIndex") == "gathers and scatters"
    assert family("something else") == "other"


def test_quality_plans_and_figures(load, monkeypatch, tmp_path, capsys):
    quality = load("quality")
    tiny = {"max_len": 4, "samples": 64, "batch_size": 8, "eval_samples": 64}
    monkeypatch.setattr(quality, "SYNTHETIC", quality.replace(quality.SYNTHETIC, **tiny))
    evaluate = quality.Trainer.evaluate
    monkeypatch.setattr(quality.Trainer, "evaluate", lambda self, split="valid", limit=64: evaluate(self, split, 64))
    arguments = ["--part", "synthetic", "--config", "tiny", "--seeds", "2", "--steps", "2", "--out", str(tmp_path)]
    assert quality.main(arguments) == 0
    (path,) = tmp_path.glob("quality-*.json")
    records = json.loads(path.read_text())["records"]
    assert [r["config"]["seed"] for r in records] == [0, 1]
    (row,) = quality.summary(records)
    assert row["ne"] == pytest.approx(sum(r["test"]["ne"] for r in records) / 2) and row["ne_std"] > 0
    assert 0.5 < row["best_ne"]["ctr"] < 1 and path.with_suffix(".png").exists()
    assert "quality-" in capsys.readouterr().out

    options = quality.parser().parse_args(
        ["--modes", "eager", "gemopt", "--config", "tiny", "base", "--steps", "9", "--movielens-steps", "9"]
    )
    names = [(c.data, label, c.mode, c.seed) for c, label in quality.plans(options)]
    assert len(names) == len(set(names)) == 3 * (2 * 2 + 3 + 1)
    assert ("movielens", "sasrec", "gemopt", 0) not in names and ("movielens", "gem small", "gemopt", 2) in names
    rates = {c.config: (c.lr, c.warmup) for c, _ in quality.plans(options) if c.data != "movielens"}
    assert rates == {"tiny": (3e-3, 50), "base": (3e-4, 200)}

    apart = [["--seeds", "2", "--config", "tiny"], ["--seeds", "1", "--first-seed", "2", "--config", "tiny"]]
    plans = [quality.plans(quality.parser().parse_args([*a, "--steps", "9", "--movielens-steps", "9"])) for a in apart]
    assert [{c.seed for c, _ in plan} for plan in plans] == [{0, 1}, {2}]
