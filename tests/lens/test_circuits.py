"""Circuits of planted heads and neurons, and identities of the factored matrices."""

from typing import Any

import pytest
import torch

from addnorm.errors import InputError
from addnorm.layers.addnorm import ADDNORMS
from addnorm.lens.circuits import (
    Factored,
    composition,
    copying_score,
    embedding_matrix,
    head_weights,
    name_entries,
    neuron,
    ov_circuit,
    qk_circuit,
    random_composition,
    read_matrices,
    top_activations,
    unembedding_matrix,
    virtual_weights,
)
from addnorm.lens.look import look
from addnorm.lens.path_gains import path_gain, read_gain
from addnorm.lens.places import find_sublayers
from tests.conftest import close, inputs, make
from tests.lens.planted import DETECTED, PROMOTED, VOCAB, planted


def draw() -> Factored:
    return Factored(torch.randn(7, 3).double(), torch.randn(3, 5).double())


def test_factored_matrices_are_matrices() -> None:
    one, other = draw(), draw()
    close((one @ other.T).dense(), one.dense() @ other.dense().T)
    assert one.norm() == pytest.approx(float(one.dense().norm()))
    close(one.singular_values(), torch.linalg.svdvals(one.dense())[:3])
    row, column, value = one.top(1)[0]
    assert value == pytest.approx(float(one.dense().max())) == float(one.dense()[row, column])
    square = Factored(torch.randn(6, 2).double(), torch.randn(2, 6).double())
    whole = torch.linalg.eigvals(square.dense())
    close(square.eigenvalues().sum(), whole.sum(), 1e-8)
    entries = name_entries([(0, 1, 2.0)], ["a", "b"])
    assert entries == [("a", "b", 2.0)]


def test_a_planted_copy_head_copies() -> None:
    model = planted()
    close(ov_circuit(model, "decoder.0.attention.0").dense(), torch.eye(VOCAB).double())
    assert copying_score(model, "decoder.0.attention.0") == pytest.approx(1.0)
    assert copying_score(model, "decoder.0.attention.1") == 0
    assert not qk_circuit(model, "decoder.0.attention.0").dense().any()  # it attends by position


def test_a_planted_neuron_is_read() -> None:
    model = planted()
    found = neuron(model, "decoder.0.ffn", 2)
    assert found.fired_by[0] == (DETECTED, 1.0) and found.promotes[0] == (PROMOTED, 3.0)
    assert found.fired_by[1][1] == 0
    ids = torch.tensor([[1, DETECTED, 2], [4, 5, DETECTED]])
    seen = look(model, ids, "neurons:decoder.0.ffn")
    places = top_activations(seen, "decoder.0.ffn", 2, 2)
    assert sorted(places) == [(0, 1, 1.0), (1, 2, 1.0)]


def test_circuits_explain_the_scores_of_a_model_without_positions() -> None:
    """Softmax of the QK circuit is the map, and the OV circuit the logits, of one linear layer."""
    model = make(
        "decoder", depth=1, norm="none", addnorm="pre", positions="none", attention_bias="none"
    )
    (ids,) = inputs("decoder", 1)
    weights = look(model, ids).maps["decoder.0.attention"]
    for head in range(4):
        scores = qk_circuit(model, f"decoder.0.attention.{head}").dense()[ids[0]][:, ids[0]]
        hidden = torch.full_like(scores, -torch.inf).triu(1)
        close((scores * 4**-0.5 + hidden).softmax(dim=-1), weights[0, head])


AFTER = ("post", "admin", "b2t", "deepnorm", "dual")
"""Arrangements whose boxes end with a norm of the whole stream."""


def with_random_gains(**changes: Any) -> Any:
    model = make("decoder", **changes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name and name.endswith("weight"):
                parameter.copy_(torch.rand_like(parameter) + 0.5)
    return model


@pytest.mark.parametrize("addnorm", ADDNORMS)
def test_the_gain_of_what_is_read(addnorm: str) -> None:
    """A branch reads through γ of its own norm, or of the one that ends the box before, or none."""
    model = with_random_gains(addnorm=addnorm)
    previous = None
    for step in find_sublayers(model):
        gain, norm = read_gain(model, step), step.box.norm
        if addnorm in AFTER:
            expected = torch.ones_like(gain) if previous is None else previous.weight
            close(gain, expected.detach())
        elif addnorm in ("res-post", "rezero", "t-fixup", "fixup", "none"):
            close(gain, torch.ones_like(gain))
        else:
            ratio = gain / norm.weight  # type: ignore[operator]
            close(ratio, ratio[:1].expand_as(ratio))
            if addnorm == "lns":
                close(ratio, torch.full_like(ratio, (step.layer + 1) ** -0.5))
            elif addnorm not in ("dlcl", "hyper"):
                close(ratio, torch.ones_like(ratio))
        previous = norm


@pytest.mark.parametrize("addnorm", ("post", "deepnorm", "admin", "res-post", "pre", "layerscale"))
def test_the_gain_of_a_path(addnorm: str) -> None:
    """From the first attention to the second: a product of gains, and of weights of shortcuts."""
    model = with_random_gains(addnorm=addnorm)
    first, second = (model.decoder.stack.blocks[n].addnorms for n in range(2))
    one, two, last = (box.norm.weight for box in (first["attention"], first["ffn"], second["ffn"]))
    third = second["attention"].norm.weight
    if addnorm in ("post", "deepnorm", "admin"):
        boxes = (*first.values(), *second.values())
        weights = [getattr(box, "alpha", getattr(box, "omega", 1.0)) for box in boxes]
        between, rest = one * weights[1] * two, weights[2] * third * weights[3] * last
        expected = (between, between * rest)
    elif addnorm == "res-post":
        expected = (one, one * model.decoder.stack.ends.norm.weight)
    else:
        own = getattr(first["attention"], "scale", 1.0)
        expected = (own * third, own * model.decoder.stack.ends.norm.weight)
    names = "decoder.0.attention", "decoder.1.attention"
    close(path_gain(model, *names), expected[0].detach())
    close(path_gain(model, names[0], None), expected[1].detach())
    read = model.decoder.stack.blocks[1].sublayers["attention"].matrices()["key"]
    write = model.decoder.stack.blocks[0].sublayers["attention"].output.weight
    close(virtual_weights(model, *names, "key"), (read * expected[0] @ write).detach())


def test_circuits_of_post_norm_follow_the_gains() -> None:
    """Gains times 3 in one box: what passes it counts three times."""
    head, later = "decoder.0.attention.1", "decoder.1.attention.2"
    model = make("decoder", addnorm="post")
    before = [ov_circuit(model, head).dense(), qk_circuit(model, later).dense()]
    unembedding, scores = unembedding_matrix(model), composition(model, head, later)
    with torch.no_grad():
        model.decoder.stack.blocks[0].addnorms["ffn"].norm.weight.mul_(3)
    close(ov_circuit(model, head).dense(), 3 * before[0])
    close(qk_circuit(model, later).dense(), 9 * before[1])  # queries and keys
    close(unembedding_matrix(model), unembedding)
    for name, score in composition(model, head, later).items():
        assert score == pytest.approx(scores[name])
    with torch.no_grad():
        model.decoder.stack.blocks[1].addnorms["ffn"].norm.weight[:5].mul_(3)
    close(unembedding_matrix(model)[:, :5], 3 * unembedding[:, :5])
    close(unembedding_matrix(model)[:, 5:], unembedding[:, 5:])


def test_the_norm_of_an_embedding_is_part_of_it() -> None:
    model = make("encoder", addnorm="post", embed_norm=True, head="masked")
    plain = embedding_matrix(model)
    with torch.no_grad():
        model.encoder.norm.weight.mul_(2)
    close(embedding_matrix(model), 2 * plain)


def test_encoder_decoder_attention_reads_the_memory() -> None:
    model = make("encoder-decoder", addnorm="pre")
    close(
        head_weights(model, "decoder.0.memory.1").key,
        model.decoder.stack.blocks[0].sublayers["memory"].matrices()["key"][4:8].detach()
        * model.encoder.stack.ends.norm.weight.detach(),
    )
    scores = composition(model, "encoder.1.attention.0", "decoder.1.memory.2")
    assert scores["query"] == 0 and min(scores["key"], scores["value"]) > 0
    assert not virtual_weights(model, "decoder.0.ffn", "decoder.1.memory.0", "key").any()
    circuit = ov_circuit(model, "decoder.1.memory.0").dense()
    assert tuple(circuit.shape) == (19, 19) and bool(circuit.any())


def test_grouped_heads_share_keys_and_values() -> None:
    model = make("decoder", kv_heads=2)
    one, other, third = (head_weights(model, f"decoder.0.attention.{h}") for h in (0, 1, 2))
    assert torch.equal(one.key, other.key) and torch.equal(one.value, other.value)
    assert not torch.equal(one.key, third.key) and not torch.equal(one.query, other.query)


def test_composition_finds_a_head_that_reads_another() -> None:
    model = make("decoder", addnorm="pre", norm="none")
    first, second = (block.sublayers["attention"] for block in model.decoder.stack.blocks)
    with torch.no_grad():  # head 2 of layer 1 has keys along what head 1 of layer 0 writes
        written = first.matrices()["output"][:, 4:8]
        second.matrices()["key"][8:12] = written.T
    scores = {
        (i, j): composition(model, f"decoder.0.attention.{i}", f"decoder.1.attention.{j}")["key"]
        for i in range(4)
        for j in range(4)
    }
    assert max(scores, key=scores.__getitem__) == (1, 2)
    assert all(0 <= score <= 1 for score in scores.values())
    assert random_composition(16, 4) < scores[1, 2]


def test_virtual_weights_read_what_was_written() -> None:
    model = make("decoder", addnorm="pre")
    found = virtual_weights(model, "decoder.0.attention.1", "decoder.1.ffn", "input")
    ffn = model.decoder.stack.blocks[1].sublayers["ffn"].input.weight
    gain = model.decoder.stack.blocks[1].addnorms["ffn"].norm.weight
    written = model.decoder.stack.blocks[0].sublayers["attention"].output.weight[:, 4:8]
    close(found, (ffn * gain) @ written)
    assert set(read_matrices(make("decoder", ffn="swiglu"), "decoder.0.ffn")) == {"gate", "input"}


def test_embedding_and_unembedding_have_their_scales() -> None:
    model, (ids,) = make("decoder", addnorm="pre", norm="rms", scale_output=True), inputs("decoder")
    seen = look(model, ids, ("stream", "norms"))
    final = seen.stream["decoder.1.ffn"] / seen.norms["decoder.close.norm"]
    close(final @ unembedding_matrix(model).T, model(ids))
    close(embedding_matrix(model).T[ids], seen.embeddings["decoder"][0])


def test_mistakes_are_explained() -> None:
    model = make("decoder")
    with pytest.raises(InputError, match="a head is a place and a number below 4"):
        head_weights(model, "decoder.0.attention")
    with pytest.raises(InputError, match="the writer must come before the reader"):
        virtual_weights(model, "decoder.1.ffn", "decoder.0.ffn", "input")
    with pytest.raises(InputError, match=r"ffn reads with input: got 'query'"):
        virtual_weights(model, "decoder.0.ffn", "decoder.1.ffn", "query")
    with pytest.raises(InputError, match="not a feed-forward network"):
        neuron(model, "decoder.0.attention", 1)
    with pytest.raises(InputError, match="has 64 neurons, numbered from 0: got 64"):
        neuron(model, "decoder.0.ffn", 64)
    with pytest.raises(InputError, match="has no neurons"):
        top_activations(look(model, torch.tensor([[1]])), "decoder.0.ffn", 1)
    with pytest.raises(InputError, match="needs a model with a token head"):
        unembedding_matrix(make("encoder", head="class", outputs=2))
    with pytest.raises(InputError, match="reads token ids"):
        embedding_matrix(
            make("encoder", input="vectors", vocab=0, pad=None, head="class", outputs=2)
        )


def test_circuits_of_narrow_embeddings_and_a_masked_head() -> None:
    """ELECTRA: the projection belongs to the embedding, the head's layer to the unembedding."""
    model = make("encoder", embed_width=8, head="masked", addnorm="post")
    embedding = model.encoder.project.weight @ model.tokens.weight.T
    close(embedding_matrix(model), embedding.detach() * model.tokens.scale)
    head = model.head
    expected = (model.tokens.weight * head.norm.weight) @ head.transform.weight
    expected = expected * model.encoder.stack.blocks[-1].addnorms["ffn"].norm.weight
    close(unembedding_matrix(model), expected.detach())
    vocab = len(model.tokens.weight)
    assert tuple(ov_circuit(model, "encoder.0.attention.1").dense().shape) == (vocab, vocab)
