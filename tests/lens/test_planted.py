"""Every view reports a planted copy head and a planted neuron, in arrangements with real norms."""

import pytest
import torch

from addnorm.lens.attention import head_statistics
from addnorm.lens.attribution import integrated_gradients
from addnorm.lens.circuits import copying_score, neuron, ov_circuit, top_activations
from addnorm.lens.explain import explain_sequence
from addnorm.lens.look import look
from addnorm.lens.patching import ablate, logit_metric
from addnorm.lens.readout import attribute_logits, logit_lens
from addnorm.lens.stream import decompose
from addnorm.models.transformer import Decoder
from tests.lens.planted import DETECTED, PROMOTED, VOCAB, planted

COPY, FFN = "decoder.0.attention.0", "decoder.0.ffn"
IDS = torch.tensor([[4, 7, 1, 8, 2]])
"""At the last position, head 0 copies token 8; the neuron is silent."""
FIRING = torch.tensor([[4, 7, 1, 8, DETECTED]])
"""The neuron fires at the last position, too."""


@pytest.fixture(
    params=[(addnorm, norm) for addnorm in ("pre", "post", "res-post") for norm in ("rms", "layer")]
)
def model(request: pytest.FixtureRequest) -> Decoder:
    return planted(*request.param)


def test_attention(model: Decoder) -> None:
    found = head_statistics(look(model, IDS), IDS)
    assert found.ranked("previous")[0] == (COPY, pytest.approx(1.0, abs=1e-6))
    assert found.of("decoder.0.attention", 1)["previous"] < 0.5


def test_the_stream_and_the_logits(model: Decoder) -> None:
    copied = attribute_logits(decompose(model, IDS, positions=[-1]), 8, against="others")
    assert copied.ranked()[0][0] == COPY and copied.error < 1e-9
    promoted = attribute_logits(decompose(model, FIRING, positions=[-1]), PROMOTED, "others")
    assert promoted.ranked()[0][0] == FFN and promoted.error < 1e-9
    # The logit lens: the copy is there after the attention, the promotion after the neuron.
    table = logit_lens(model, IDS, positions=[-1])
    assert table.logits[1:, 0, 0].argmax(dim=-1).tolist() == [8, 8]
    _, before, after = logit_lens(model, FIRING, positions=[-1]).logits[:, 0, 0]
    assert int(before.argmax()) == 8 and int((after - before).argmax()) == PROMOTED


def test_ablation(model: Decoder) -> None:
    assert ablate(model, IDS, logit_metric(8), method="zero").ranked()[0][0] == COPY
    assert ablate(model, FIRING, logit_metric(PROMOTED), method="zero").ranked()[0][0] == FFN


def test_inputs(model: Decoder) -> None:
    """The copied logit rests on the token before, the promoted one on the token that is detected.

    The path starts from another text, as `explain` does: at an embedding of zero a norm has no
    scale.
    """
    other = {"decoder": torch.tensor([[0, 0, 0, 0, 0]])}
    for ids, output, place in ((IDS, 8, 3), (FIRING, PROMOTED, 4)):
        found = integrated_gradients(model, ids, logit_metric(output), baseline=other)
        assert int(found.contributions["decoder"][0].argmax()) == place


def test_weights(model: Decoder) -> None:
    circuit = ov_circuit(model, COPY).dense()
    assert circuit.argmax(dim=0).tolist() == list(range(VOCAB))
    assert copying_score(model, COPY) == pytest.approx(1.0)
    assert copying_score(model, "decoder.0.attention.1") == 0
    found = neuron(model, FFN, 2)
    assert found.fired_by[0][0] == DETECTED and found.promotes[0][0] == PROMOTED
    places = top_activations(look(model, FIRING, f"neurons:{FFN}"), FFN, 2, 2)
    assert places[0][:2] == (0, 4) and places[0][2] > 5 * abs(places[1][2])


def test_the_whole_explanation(model: Decoder) -> None:
    names = [str(i) for i in IDS[0].tolist()]
    found = explain_sequence(model, IDS, tokens={"decoder": names}, name_of=str)
    assert found.outputs[-1] == "8" and found.top_pieces(-1, 1)[0][0] == COPY
    assert found.top_inputs(-1, 1)[0][1] == "8"
    assert found.statistics[COPY]["previous"] == pytest.approx(1.0, abs=1e-6)
