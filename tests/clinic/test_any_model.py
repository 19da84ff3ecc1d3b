"""Ordinary models and batches of other people: no crash, no false alarm, the right arrangement."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from addnorm.clinic import ClinicBatch, Examination, examine
from addnorm.clinic.call_model import complete_batch, plain_execution, unwrap
from addnorm.clinic.residual_trace import trace_stream
from addnorm.errors import InputError
from tests.clinic import models
from tests.clinic.subjects import Language, ids, next_token

CAUSAL = torch.ones(64, 64, dtype=torch.bool).triu(1)


def quick(model: nn.Module, batch: Any, loss: Any = None, **options: Any) -> Examination:
    return examine(model, batch, loss, sharpness=False, **options)


class Blocks(nn.Module):
    """A language model whose blocks join their branches as a function says."""

    def __init__(
        self, join: Any, depth: int = 2, ends: Any = lambda x, y: y, pre: bool = True
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(32, 16), nn.Embedding(32, 16)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "attention": nn.MultiheadAttention(16, 2, batch_first=True),
                    "feed": nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)),
                    "one": nn.LayerNorm(16),
                    "two": nn.LayerNorm(16),
                    "gate": nn.Linear(16, 16),
                }
            )
            for _ in range(depth)
        )
        self.final, self.head = nn.LayerNorm(16), nn.Linear(16, 32)
        self.join, self.ends, self.pre = join, ends, pre

    def attend(self, layer: Any, x: Tensor) -> Tensor:
        n = x.shape[1]
        mask = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1)
        return layer["attention"](x, x, x, attn_mask=mask, need_weights=False)[0]

    def forward(self, ids: Tensor) -> Any:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = self.join(self, layer, x)
        x = self.final(x)
        return self.ends(x, self.head(x))


def plain(model: Any, layer: Any, x: Tensor) -> Tensor:
    x = x + model.attend(layer, layer["one"](x))
    return x + layer["feed"](layer["two"](x))


def post(model: Any, layer: Any, x: Tensor) -> Tensor:
    x = layer["one"](x + model.attend(layer, x))
    return layer["two"](x + layer["feed"](x))


def res_post(model: Any, layer: Any, x: Tensor) -> Tensor:
    x = x + layer["one"](model.attend(layer, x))
    return x + layer["two"](layer["feed"](x))


def sandwich(model: Any, layer: Any, x: Tensor) -> Tensor:
    x = x + layer["two"](model.attend(layer, layer["one"](x)))
    return x + layer["two"](layer["feed"](layer["one"](x)))


def parallel(model: Any, layer: Any, x: Tensor) -> Tensor:
    y = layer["one"](x)
    return model.attend(layer, y) + layer["feed"](y) + x


def gated(model: Any, layer: Any, x: Tensor) -> Tensor:
    f, g = model.attend(layer, layer["one"](x)), layer["gate"](x).sigmoid()
    x = g * f + (1 - g) * x
    f, g = layer["feed"](layer["two"](x)), layer["gate"](x).sigmoid()
    return x + g * (f - x)


def in_place(model: Any, layer: Any, x: Tensor) -> Tensor:
    y = model.attend(layer, layer["one"](x))
    y += x
    z = layer["feed"](layer["two"](y))
    z += y
    return z


def checkpointed(model: Any, layer: Any, x: Tensor) -> Tensor:
    return checkpoint(lambda y: plain(model, layer, y), x, use_reentrant=True)


ARRANGEMENTS = {
    plain: "pre",
    post: "post",
    res_post: "res-post",
    sandwich: "sandwich",
    parallel: "pre, parallel",
    gated: "pre, gated",
    in_place: "pre",
    checkpointed: "pre",
}


@pytest.mark.parametrize(
    "join",
    [
        pytest.param(join, marks=pytest.mark.slow if join is checkpointed else ())
        for join in ARRANGEMENTS
    ],
    ids=lambda join: join.__name__,
)
def test_arrangements_are_named(join: Any) -> None:
    result = quick(Blocks(join), ids(4, 8))
    assert result.evidence.arrangement.name == ARRANGEMENTS[join]
    assert result.names() == [] and result.healthy, result.text()
    assert ARRANGEMENTS[join].split(",")[0] in result.text()


def test_both_branches_of_a_parallel_block_are_named() -> None:
    model = Blocks(parallel)
    sites = trace_stream(model, ClinicBatch(ids(4, 8))).sites
    assert [site.name for site in sites] == ["layers.0.attention + ffn", "layers.1.attention + ffn"]
    assert all(site.parallel and site.role == "parallel" for site in sites)


def scaled(factor: float) -> Any:
    def join(model: Any, layer: Any, x: Tensor) -> Tensor:
        x = factor * x + model.attend(layer, layer["one"](x))
        return torch.lerp(x, 2 * layer["feed"](layer["two"](x)), 0.5)

    return join


def test_scaled_shortcuts_are_multiplied_over_the_depth() -> None:
    result = quick(Blocks(scaled(0.5), depth=3), ids(4, 8))
    assert result.evidence.arrangement.scaled
    assert result.evidence.arrangement.shortcut_product == pytest.approx(0.5**6)
    assert "shortcut scaled" in result.names()


def test_doubling_by_a_sum_is_a_factor() -> None:
    def join(model: Any, layer: Any, x: Tensor) -> Tensor:
        x = x + x + model.attend(layer, layer["one"](x))
        return x + x + layer["feed"](layer["two"](x))

    assert quick(Blocks(join, depth=3), ids(4, 8)).names() == ["shortcut scaled"]


def test_a_detached_stream_and_missing_residuals_are_found() -> None:
    def cut(model: Any, layer: Any, x: Tensor) -> Tensor:
        x = x.detach() + model.attend(layer, layer["one"](x))
        return x + layer["feed"](layer["two"](x))

    def bare(model: Any, layer: Any, x: Tensor) -> Tensor:
        return layer["feed"](layer["two"](model.attend(layer, layer["one"](x))))

    def half(model: Any, layer: Any, x: Tensor) -> Tensor:
        x = model.attend(layer, layer["one"](x))
        return x + layer["feed"](layer["two"](x))

    assert quick(Blocks(cut), ids(4, 8)).names() == ["gradient cut"]
    first = quick(Blocks(bare), ids(4, 8)).findings[0]
    assert first.name == "no residual connections" and first.severity == "problem"
    assert "residual missing" in quick(Blocks(half), ids(4, 8)).names()


def test_memory_that_is_overwritten_is_measured_before() -> None:
    """x += f overwrites what the norm needs: training fails, and the clinic says so."""

    def join(model: Any, layer: Any, x: Tensor) -> Tensor:
        x = x.clone()
        x += model.attend(layer, layer["one"](x))
        x += layer["feed"](layer["two"](x))
        return x

    model = Blocks(join)
    with torch.no_grad():
        sites = trace_stream(model, ClinicBatch(ids(4, 8))).sites
    for site in sites:
        torch.testing.assert_close(site.shortcut + site.branch, site.total)
    result = quick(model, ids(4, 8))
    assert "backward pass fails" in result.names()
    assert "x = x + f(x)" in result.text()


@pytest.mark.parametrize(
    "ends",
    (lambda x, y: (x, y), lambda x, y: (y, x), lambda x, y: {"hidden": x, "scores": y}),
    ids=("hidden, logits", "logits, hidden", "dictionary"),
)
def test_the_logits_are_found_among_several_outputs(ends: Any) -> None:
    evidence = quick(Blocks(plain, ends=ends), ids(4, 8)).evidence
    assert evidence.loss_description == "cross-entropy of the next token"
    assert evidence.experiments.sees_future is False


def test_a_loss_in_the_output_is_the_models_own() -> None:
    model = Blocks(plain, ends=lambda x, y: (y, y.pow(2).mean()))
    assert quick(model, ids(4, 8)).evidence.loss_description == "the model's own loss"


def test_batch_norm_and_a_norm_after_the_pool_are_no_findings() -> None:
    class Stem(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Sequential(nn.Conv2d(3, 16, 4, 4), nn.BatchNorm2d(16), nn.ReLU())
            layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
            self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(self.body(self.stem(x).flatten(2).mT).mean(1)))

    result = quick(Stem(), torch.randn(4, 3, 12, 12))
    assert result.names() == [] and result.healthy, result.text()
    assert "batch statistics" in [finding.name for finding in result.findings]


def test_models_that_are_no_transformers_are_said_first() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.body = nn.Embedding(32, 16), nn.LSTM(16, 16, batch_first=True)
            self.head = nn.Linear(16, 32)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.body(self.tokens(ids))[0])

    result = quick(Recurrent(), ids(4, 8))
    assert result.findings[0].name == "not a Transformer"
    assert result.names() == [] and not result.healthy and result.verdict == "not examined"


def test_a_batch_that_does_not_fit_is_one_clear_error() -> None:
    with pytest.raises(InputError, match=r"the batch must be what Language\.forward takes: got x"):
        quick(Language(CAUSAL), {"x": ids()})


def test_wrapped_models_are_unwrapped() -> None:
    class Compiled(nn.Module):
        """As torch.compile wraps a model, without its compiler, which takes seconds to import."""

        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self._orig_mod = model

    model = Language(CAUSAL)
    assert unwrap(nn.DataParallel(model)) is model
    assert unwrap(Compiled(nn.DataParallel(Compiled(model)))) is model


def test_checkpointing_is_restored() -> None:
    from torch.utils.checkpoint import CheckpointFunction

    before = CheckpointFunction.apply
    with plain_execution():
        assert CheckpointFunction.apply is not before
    assert CheckpointFunction.apply == before


def padded(side: str) -> dict[str, Tensor]:
    tokens = torch.randint(5, 61, (4, 12))
    mask = torch.ones_like(tokens)
    where = slice(8, None) if side == "right" else slice(0, 4)
    tokens[-1, where], mask[-1, where] = 0, 0
    labels = tokens.masked_fill(mask == 0, -100)
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


@pytest.mark.parametrize("side", ("right", "left"))
def test_padded_batches_with_labels(side: str) -> None:
    for model in (models.gpt2()[0], models.llama()[0]):
        batch = padded(side)
        if side == "left":
            batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
        result = quick(model, batch)
        assert result.names() == [] and result.healthy, result.text()
        assert result.evidence.padded and result.evidence.experiments.padding_change is not None


def test_left_padding_without_position_ids_and_labels_at_padding() -> None:
    model = models.gpt2()[0]
    assert quick(model, padded("left")).names() == ["padding shifts positions"]
    batch = padded("right")
    batch["labels"] = batch["input_ids"]
    assert quick(model, batch).names() == ["padding in the loss"]


def test_an_encoder_decoder_with_labels_only() -> None:
    model: Any = models.t5()[0]
    model.config.decoder_start_token_id = 0
    batch = padded("right")
    whole = complete_batch(model, ClinicBatch(batch))
    assert "decoder_input_ids" in whole.arguments
    result = quick(model, batch)
    assert result.names() == [] and result.healthy, result.text()
    experiments = result.evidence.experiments
    assert experiments.sees_future is False and (experiments.source_change or 0) > 0


def test_nothing_is_created_on_the_default_device() -> None:
    """Every tensor is made on the device of the model, here with another one as default."""
    model, batch = Blocks(plain), ids(4, 8)
    expected = quick(model, batch)
    with torch.device("meta"):
        result = quick(model, batch)
    assert result.evidence.loss == expected.evidence.loss
    failed = [r for r in result.evidence.not_examined.values() if "failed" in r]
    assert failed == [] and result.healthy


def test_advice_is_in_the_terms_of_the_models_library() -> None:
    model = Language(CAUSAL)
    with torch.no_grad():
        model.tokens.weight.mul_(1e-3)
    (finding,) = quick(model, ids(), next_token).findings[:1]
    assert finding.name == "token embeddings too small" and "model." not in finding.remedy
