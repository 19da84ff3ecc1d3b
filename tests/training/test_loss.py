"""The loss from hidden states equals the cross-entropy of the logits, without storing them."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from addnorm import shift_right, token_loss
from addnorm.data.text.special_tokens import IGNORE
from addnorm.errors import InputError
from addnorm.training.loss import contrast_loss, linear_cross_entropy
from tests.conftest import VOCAB, close, draw, inputs, make

COUNT, WIDTH, WORDS = 13, 6, 11


class Case:
    """Hidden states, a matrix, a bias and targets, twice: for ours and for torch's."""

    def __init__(self, ignored: int = 3, bias: bool = True, scale: float = 1.0) -> None:
        real = {"dtype": torch.float64}
        self.hidden = torch.randn(COUNT, WIDTH, **real).requires_grad_()
        self.weight = (scale * torch.randn(WORDS, WIDTH, **real)).requires_grad_()
        self.bias = (scale * torch.randn(WORDS, **real)).requires_grad_() if bias else None
        self.targets = torch.randint(0, WORDS, (COUNT,))
        self.targets[torch.randperm(COUNT)[:ignored]] = IGNORE

    @property
    def parts(self) -> list[Tensor]:
        return [self.hidden, self.weight, *([] if self.bias is None else [self.bias])]

    def ours(self, **settings: Any) -> Tensor:
        arguments = (self.hidden, self.weight, self.targets)
        return linear_cross_entropy(*arguments, bias=self.bias, **settings)

    def reference(self, smoothing: float = 0.0, reduction: str = "mean") -> Tensor:
        logits = F.linear(self.hidden, self.weight, self.bias)
        rest = {"label_smoothing": smoothing, "ignore_index": IGNORE, "reduction": reduction}
        return F.cross_entropy(logits, self.targets, **rest)

    def agree(self, one: Tensor, two: Tensor, tolerance: float = 1e-10) -> None:
        """Assert equal values and equal gradients of hidden states, matrix and bias."""
        close(one, two, tolerance)
        gradients = torch.autograd.grad(one, self.parts, retain_graph=True)
        expected = torch.autograd.grad(two, self.parts, retain_graph=True)
        for gradient, other in zip(gradients, expected, strict=True):
            close(gradient, other, tolerance)


# ── Equal to torch's ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("smoothing", (0.0, 0.1, 0.9))
@pytest.mark.parametrize("bias", (True, False))
@pytest.mark.parametrize("ignored", (0, 3, COUNT - 1))
@pytest.mark.parametrize("chunk", (1, 4, COUNT, 100))
def test_values_and_gradients(smoothing: float, bias: bool, ignored: int, chunk: int) -> None:
    case = Case(ignored, bias)
    case.agree(case.ours(smoothing=smoothing, chunk=chunk), case.reference(smoothing))


@given(
    chunk=st.integers(1, 20),
    smoothing=st.floats(0, 0.99),
    ignored=st.integers(0, COUNT - 1),
    seed=st.integers(0, 99),
)
@settings(max_examples=30)
def test_values_and_gradients_of_any_case(
    chunk: int, smoothing: float, ignored: int, seed: int
) -> None:
    torch.manual_seed(seed)
    case = Case(ignored, bias=seed % 2 == 0)
    case.agree(case.ours(smoothing=smoothing, chunk=chunk), case.reference(smoothing))


def test_any_leading_shape_is_accepted() -> None:
    case = Case()
    hidden, targets = case.hidden[:12].view(2, 3, 2, WIDTH), case.targets[:12].view(2, 3, 2)
    flat = linear_cross_entropy(case.hidden[:12], case.weight, case.targets[:12])
    close(linear_cross_entropy(hidden, case.weight, targets), flat)


def test_the_ignored_target_can_be_changed() -> None:
    case = Case(ignored=0)
    logits = F.linear(case.hidden, case.weight, case.bias)
    case.agree(case.ours(ignore=2), F.cross_entropy(logits, case.targets, ignore_index=2))


def test_only_required_gradients_are_computed() -> None:
    case = Case()
    for required in case.parts:
        for part in case.parts:
            part.requires_grad_(part is required)
        (gradient,) = torch.autograd.grad(case.ours(), required)
        (expected,) = torch.autograd.grad(case.reference(), required)
        close(gradient, expected)


@pytest.mark.parametrize("smoothing", (0.0, 0.1))
@pytest.mark.parametrize("scale", (1e2, 1e4))
def test_extreme_logits(scale: float, smoothing: float) -> None:
    case = Case(scale=scale)
    assert F.linear(case.hidden, case.weight).abs().max() > scale
    case.agree(case.ours(smoothing=smoothing, chunk=5), case.reference(smoothing))


@pytest.mark.parametrize("sign", (1, -1))
def test_one_moderate_logit_between_extremes(sign: int) -> None:
    hidden = torch.ones(2, 1, dtype=torch.float64, requires_grad=True)
    weight = torch.tensor([[1e4], [-1e4], [sign * 1e4]], dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 1])
    ours = linear_cross_entropy(hidden, weight, targets)
    reference = F.cross_entropy(hidden @ weight.t(), targets)
    assert ours.isfinite()
    close(ours, reference)
    for one, two in zip(
        torch.autograd.grad(ours, (hidden, weight)),
        torch.autograd.grad(reference, (hidden, weight)),
        strict=True,
    ):
        assert one.isfinite().all()
        close(one, two)


@pytest.mark.parametrize(
    "scale",
    (1.0, 32.0, 1024.0),
)
def test_single_precision_of_a_confident_model(scale: float) -> None:
    """Numbers of few bits have exact sums on every CPU: only the loss itself rounds."""
    hidden = torch.randint(-8, 9, (2048, 16)).float() / 8
    weight = scale * torch.randint(-8, 9, (50, 16)).float() / 16
    exact = hidden.double() @ weight.double().t()
    targets = exact.argmax(dim=1)
    expected = F.cross_entropy(exact, targets)
    ours = linear_cross_entropy(hidden, weight, targets).double()
    reference = F.cross_entropy(hidden @ weight.t(), targets).double()
    assert (reference - expected).abs() < 1e-6 * expected
    assert (ours - expected).abs() < 1e-6 * expected


@pytest.mark.parametrize(
    "count",
    (
        1000,
        pytest.param(60_000),
    ),
)
def test_half_precision_of_many_positions(count: int) -> None:
    hidden, weight = torch.randn(count, 8).bfloat16(), (0.3 * torch.randn(50, 8)).bfloat16()
    targets = torch.randint(0, 50, (count,))
    expected = F.cross_entropy(hidden.float() @ weight.float().t(), targets)
    ours = linear_cross_entropy(hidden, weight, targets).float()
    assert (ours - expected).abs() < 0.01 * expected


# ── Positions without a target, and totals ────────────────────────────────────────────────────────


def test_all_ignored_is_zero_with_zero_gradients() -> None:
    case = Case(ignored=COUNT)
    for smoothing in (0.0, 0.1):
        loss = case.ours(smoothing=smoothing)
        assert loss == 0
        for gradient in torch.autograd.grad(loss, case.parts):
            assert not gradient.any()
    assert case.ours(total=7) == 0


@given(
    cuts=st.lists(st.integers(1, COUNT - 1), max_size=4, unique=True),
    smoothing=st.sampled_from((0.0, 0.1)),
)
@settings(max_examples=15)
def test_parts_with_the_total_of_the_whole_add_up(cuts: list[int], smoothing: float) -> None:
    torch.manual_seed(0)
    case = Case()
    total = int((case.targets != IGNORE).sum())
    ends = [0, *sorted(cuts), COUNT]
    losses = [
        linear_cross_entropy(
            case.hidden[start:stop],
            case.weight,
            case.targets[start:stop],
            bias=case.bias,
            smoothing=smoothing,
            total=total,
        )
        for start, stop in pairwise(ends)
    ]
    case.agree(torch.stack(losses).sum(), case.reference(smoothing))


def test_a_total_may_be_any_number() -> None:
    case = Case()
    case.agree(case.ours(total=5), case.reference(reduction="sum") / 5)
    case.agree(case.ours(total=1), case.reference(reduction="sum"))


def test_a_total_may_be_a_tensor() -> None:
    case = Case()
    case.agree(case.ours(total=torch.tensor(5)), case.reference(reduction="sum") / 5)


def test_accumulated_gradients_are_those_of_the_whole_batch() -> None:
    model = make("decoder")
    ids, targets = draw(4, 6), draw(4, 6)
    targets[0, 2:], targets[3, :5] = IGNORE, IGNORE
    token_loss(model, model.hidden(ids), targets).backward()
    whole = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    total = int((targets != IGNORE).sum())
    for row, row_targets in zip(ids.split(1), targets.split(1), strict=True):
        token_loss(model, model.hidden(row), row_targets, total=total).backward()
    for parameter, expected in zip(model.parameters(), whole, strict=True):
        close(parameter.grad, expected)


# ── Backward pass ─────────────────────────────────────────────────────────────────────────────────


def test_gradients_are_scaled_by_the_incoming_gradient() -> None:
    case = Case()
    plain = torch.autograd.grad(case.ours(), case.parts)
    scaled = torch.autograd.grad(3.5 * case.ours(), case.parts)
    for one, two in zip(plain, scaled, strict=True):
        close(3.5 * one, two)


def test_backward_can_be_called_twice() -> None:
    case = Case()
    loss = case.ours()
    first = torch.autograd.grad(loss, case.parts, retain_graph=True)
    second = torch.autograd.grad(loss, case.parts)
    assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))


def test_a_gradient_of_a_gradient_is_refused() -> None:
    case = Case()
    (gradient,) = torch.autograd.grad(case.ours(), case.hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.autograd.grad(gradient.sum(), case.weight)


class GradientComputed(Exception):
    pass


@pytest.fixture
def no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any) -> None:
        raise GradientComputed

    monkeypatch.setattr("addnorm.training.loss._add_gradients", never)


def test_no_gradient_is_computed_if_none_is_required(no_gradients: None) -> None:
    case = Case()
    with pytest.raises(GradientComputed):
        case.ours()
    for part in case.parts:
        part.requires_grad_(False)
    close(case.ours(), case.reference())


@pytest.mark.parametrize("without", (torch.no_grad, torch.inference_mode))
def test_no_gradient_is_computed_under_no_grad(without: Any, no_gradients: None) -> None:
    case = Case()
    with without():
        loss = case.ours()
        close(loss, case.reference())
    assert not loss.requires_grad


def test_no_grad_changes_no_bit_of_the_loss() -> None:
    case = Case()
    with torch.no_grad():
        loss = case.ours()
    assert torch.equal(loss, case.ours()) and not loss.requires_grad


# ── Memory ────────────────────────────────────────────────────────────────────────────────────────


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """Records the largest number of elements of a tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, op: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize("wants_gradient", (True, False))
@pytest.mark.parametrize("smoothing", (0.0, 0.1))
def test_only_one_chunk_of_logits_is_stored(wants_gradient: bool, smoothing: float) -> None:
    count, width, words, chunk = 64, 4, 50, 8
    hidden = torch.randn(count, width, requires_grad=wants_gradient)
    weight = torch.randn(words, width, requires_grad=wants_gradient)
    bias, targets = torch.randn(words), torch.randint(0, words, (count,))
    largest = max(chunk * words, count * width, words * width)
    with Largest() as record:
        loss = linear_cross_entropy(
            hidden, weight, targets, bias=bias, smoothing=smoothing, chunk=chunk
        )
        if wants_gradient:
            loss.backward()
    assert record.elements == largest < count * words
    with Largest() as record:
        F.cross_entropy(hidden @ weight.t(), targets)
    assert record.elements >= count * words  # so all logits would be detected


# ── Models ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("mode", "changes"),
    (
        ("decoder", {}),
        ("decoder", {"tie_embeddings": "none"}),
        ("decoder", {"tie_embeddings": "none", "unembed_bias": True}),
        ("decoder", {"unembed_bias": True}),
        ("decoder", {"scale_output": True}),
        ("encoder", {"head": "masked"}),
        ("encoder", {"head": "masked", "tie_embeddings": "none"}),
        ("encoder-decoder", {}),
        ("encoder-decoder", {"tie_embeddings": "source", "scale_output": True}),
        ("encoder-decoder", {"tie_embeddings": "output", "target_vocab": VOCAB}),
    ),
    ids=str,
)
@pytest.mark.parametrize("smoothing", (0.0, 0.1))
def test_the_loss_of_a_model(mode: str, changes: dict[str, Any], smoothing: float) -> None:
    model = make(mode, **changes)
    args, targets = inputs(mode), draw(2, 6)
    targets[0, 4:] = IGNORE
    ours = token_loss(model, model.hidden(*args), targets, smoothing=smoothing)
    logits = model(*args)
    expected = F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), label_smoothing=smoothing, ignore_index=IGNORE
    )
    close(ours, expected)
    parameters = list(model.parameters())
    for one, two in zip(
        torch.autograd.grad(ours, parameters),
        torch.autograd.grad(expected, parameters),
        strict=True,
    ):
        close(one, two)


@pytest.mark.slow
@pytest.mark.trains
def test_a_model_learns_to_copy() -> None:
    model = make("decoder", width=16, depth=1).float().train()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    targets = draw(4, 6)
    ids = shift_right(targets, start=1)
    losses = []
    for _ in range(60):
        loss = token_loss(model, model.hidden(ids), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]


# ── What is refused ───────────────────────────────────────────────────────────────────────────────


def test_each_position_needs_a_target() -> None:
    case = Case()
    with pytest.raises(InputError, match=r"^each position needs one target: 13 positions, 12 targ"):
        linear_cross_entropy(case.hidden, case.weight, case.targets[:12])


@pytest.mark.parametrize("value", (-1, WORDS, 10**9))
def test_a_target_must_be_a_token_id(value: int) -> None:
    case = Case()
    case.targets[4] = value
    message = rf"^targets must be token ids 0 to {WORDS - 1}, or -100 for none: got {value}\.$"
    with pytest.raises(InputError, match=message):
        case.ours()


def test_the_message_names_the_ignored_target() -> None:
    case = Case(ignored=0)
    case.targets[4] = WORDS
    with pytest.raises(InputError, match="or 2 for none"):
        case.ours(ignore=2)


def test_targets_must_be_integers() -> None:
    case = Case(ignored=0)
    with pytest.raises(InputError, match="targets must be"):
        linear_cross_entropy(case.hidden, case.weight, case.targets.double())


@pytest.mark.parametrize("smoothing", (-0.1, 1.5, float("nan")))
def test_smoothing_must_be_at_least_0_and_below_1(smoothing: float) -> None:
    with pytest.raises(InputError, match="smoothing must be"):
        Case().ours(smoothing=smoothing)


# ── Contrast ──────────────────────────────────────────────────────────────────────────────────────


def test_contrast_is_the_sum_of_its_formula_and_ignores_the_length_of_vectors() -> None:
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    labels, expected = torch.tensor([0, 1, 0, 2, 1, 0]), 0.0
    z = vectors / vectors.norm(dim=1, keepdim=True)
    for i in range(6):
        others = [a for a in range(6) if a != i]
        total = sum(float((z[i] @ z[a] / 0.2).exp()) for a in others)
        same = [a for a in others if labels[a] == labels[i]]
        parts = [float((z[i] @ z[p] / 0.2).exp()) / total for p in same]
        expected -= sum(float(torch.tensor(part).log()) for part in parts) / max(len(same), 1)
    assert float(contrast_loss(vectors, labels, 0.2)) == pytest.approx(expected, rel=1e-5)
    scaled = vectors * torch.tensor([[1.0], [7.0], [0.1], [3.0], [1.0], [2.0]])
    assert float(contrast_loss(scaled, labels, 0.2)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("labels", [[0], [0, 1], [0, 1, 2]])
def test_rows_without_another_of_their_label_have_no_contrast(labels: list[int]) -> None:
    vectors = torch.randn(len(labels), 3, requires_grad=True)
    loss = contrast_loss(vectors, torch.tensor(labels))
    loss.backward()
    assert loss.item() == 0.0
    assert vectors.grad is not None and bool(vectors.grad.isfinite().all())
