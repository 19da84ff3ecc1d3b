"""Parity with torch.nn.Transformer: the whole encoder-decoder, with copied weights."""

import pytest
import torch
from torch import Tensor, nn

import addnorm
from addnorm import Mask
from addnorm.config import ModelConfig
from tests.parity import mapping
from tests.parity.common import LIMITS, gap, padded, randomise_

pytestmark = [
    pytest.mark.parity,
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True, but:UserWarning"),
]

VOCAB, WIDTH, HEADS, DEPTH, DECODER_DEPTH, FFN = 61, 32, 4, 2, 3, 48

ARRANGEMENTS = [
    pytest.param(arrangement, ffn, id=f"{arrangement}-{ffn}")
    for arrangement in ("post", "pre")
    for ffn in ("relu", "gelu")
]


def make_theirs(arrangement: str, ffn: str, dtype: torch.dtype) -> nn.Transformer:
    model = nn.Transformer(
        d_model=WIDTH,
        nhead=HEADS,
        num_encoder_layers=DEPTH,
        num_decoder_layers=DECODER_DEPTH,
        dim_feedforward=FFN,
        dropout=0.0,
        activation=ffn,
        batch_first=True,
        norm_first=arrangement == "pre",
    )
    # Training mode without dropout: the plain path, not the fused one, which drops padding.
    return randomise_(model).to(dtype).train()


def config(arrangement: str, ffn: str) -> ModelConfig:
    """nn.Transformer ends both stacks with a norm, also with post-norm."""
    return ModelConfig(
        vocab=VOCAB,
        width=WIDTH,
        heads=HEADS,
        depth=DEPTH,
        decoder_depth=DECODER_DEPTH,
        ffn=ffn,
        ffn_width=FFN,
        addnorm=arrangement,
        final_norm=arrangement == "post",
        dropout=0.0,
        head="none",
    )


def make_ours(theirs: nn.Transformer, c: ModelConfig) -> nn.Module:
    model = addnorm.build(c).to(theirs.encoder.norm.weight.dtype)
    renamed = mapping.torch_transformer(theirs.state_dict(), place_of_last_norm(c.addnorm))
    model.load_state_dict(renamed | {"tokens.weight": model.tokens.weight})
    return model.train()


def place_of_last_norm(arrangement: str) -> str:
    return "norm" if arrangement == "post" else "ends.norm"


def embed(weight: Tensor, ids: Tensor, real: Tensor) -> Tensor:
    """Tokens times √width plus interleaved sinusoids: nn.Transformer has no embedding."""
    places = (real.cumsum(1) - 1).clamp(min=0).double()[..., None]  # padding does not count
    rates = 10000.0 ** -(torch.arange(0, WIDTH, 2).double() / WIDTH)
    table = torch.zeros(*ids.shape, WIDTH, dtype=torch.float64)
    table[..., 0::2], table[..., 1::2] = torch.sin(places * rates), torch.cos(places * rates)
    return weight[ids] * WIDTH**0.5 + table.to(weight.dtype)


def run_both(theirs: nn.Transformer, ours: nn.Module) -> tuple[Tensor, Tensor]:
    """Return the decoder outputs of both models at the real positions of the target.

    The padding is in the middle of the target: at its end no query would see it anyway, and at its
    start some queries would see no key, for which nn.Transformer returns NaN.
    """
    source, source_real = padded((9, 6, 4), VOCAB, "left", seed=1)
    target, target_real = padded((5, 7, 3), VOCAB, "right", seed=2)
    target_real[1, 2:4] = False
    weight = ours.tokens.weight
    expected = theirs(
        embed(weight, source, source_real),
        embed(weight, target, target_real),
        tgt_mask=torch.ones(7, 7, dtype=torch.bool).triu(1),
        src_key_padding_mask=~source_real,
        tgt_key_padding_mask=~target_real,
        memory_key_padding_mask=~source_real,
    )
    masks = {"source_mask": Mask.padding(source_real), "target_mask": Mask.padding(target_real)}
    return expected[target_real], ours(source, target, **masks)[target_real]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize(("arrangement", "ffn"), ARRANGEMENTS)
def test_outputs(arrangement: str, ffn: str, dtype: torch.dtype) -> None:
    theirs = make_theirs(arrangement, ffn, dtype)
    expected, actual = run_both(theirs, make_ours(theirs, config(arrangement, ffn)))
    assert gap(expected, actual) <= LIMITS[dtype]


@pytest.mark.parametrize(("arrangement", "ffn"), ARRANGEMENTS)
def test_gradient_of_every_weight(arrangement: str, ffn: str) -> None:
    theirs = make_theirs(arrangement, ffn, torch.float64)
    ours = make_ours(theirs, config(arrangement, ffn))
    expected, actual = run_both(theirs, ours)
    upstream = torch.randn(actual.shape, generator=torch.Generator().manual_seed(3)).double()
    (expected * upstream).sum().backward()
    from_theirs = ours.tokens.weight.grad.clone()
    ours.zero_grad()
    (actual * upstream).sum().backward()
    grads = {name: weight.grad for name, weight in theirs.named_parameters()}
    grads = mapping.torch_transformer(grads, place_of_last_norm(arrangement))
    grads["tokens.weight"] = from_theirs
    gradients = {name: weight.grad for name, weight in ours.named_parameters()}
    assert grads.keys() == gradients.keys()
    for name, grad in grads.items():
        assert gap(grad, gradients[name]) <= 1e-10, name
        assert grad.abs().max() > 1e-6, f"{name} has no effect, so the comparison is void"


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"norm_eps": 1e-6}, id="epsilon"),
        pytest.param({"ffn": "gelu-tanh"}, id="activation"),
        pytest.param({"position_options": {"layout": "halves"}}, id="sinusoids"),
        pytest.param({"attention_scale": 0.36}, id="scale"),
    ],
)
@pytest.mark.parametrize("arrangement", ["post", "pre"])
def test_a_small_difference_is_noticed(arrangement: str, changes: dict[str, object]) -> None:
    theirs = make_theirs(arrangement, "gelu", torch.float64)
    expected, actual = run_both(
        theirs, make_ours(theirs, config(arrangement, "gelu").replace(**changes))
    )
    assert gap(expected, actual) > 100 * LIMITS[torch.float64]
