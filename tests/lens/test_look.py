"""A look changes nothing, captures what was asked for, and states its size."""

import re
import sys
from pathlib import Path

import pytest
import torch

from addnorm import lens
from addnorm.errors import InputError
from addnorm.layers.addnorm import ADDNORMS
from addnorm.lens.look import KINDS, look
from addnorm.lens.places import find_sublayers
from addnorm.lens.stream import decompose
from addnorm.models.build import Model
from addnorm.models.tabular import TabularConfig, TabularModel, build_tabular, trunk_of
from tests.conftest import MODES, POSITIONS, VARIANTS, close, inputs, make, slow_except

FAST = ("post", "pre", "hyper", "dual")


def table_model(
    kind: str, norm: str = "layer", addnorm: str = "pre", members: int = 1
) -> TabularModel:
    trunk = trunk_of(
        kind,
        width=16,
        depth=2,
        heads=4,
        ffn_width=8,
        norm=norm,
        addnorm=addnorm,
        addnorm_options={},
    )
    config = TabularConfig(
        kind=kind, numbers=2, categories=(3, 4), outputs=2, trunk=trunk, members=members
    )
    model = build_tabular(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.double().eval()


def table_rows(count: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(count, 2).double(), torch.randint(0, 3, (count, 2))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("addnorm", slow_except(FAST, ADDNORMS))
def test_the_output_is_equal_to_the_bit(mode: str, addnorm: str) -> None:
    model, batch = make(mode, addnorm=addnorm).float(), inputs(mode)
    plain = model(*batch)
    for want in ((), "maps", tuple(KINDS)):
        assert torch.equal(look(model, batch, want).output, plain)
    assert torch.equal(model(*batch), plain)


@pytest.mark.parametrize("kind", ("ft", "tab", "saint"))
def test_tables_are_equal_to_the_bit_too(kind: str) -> None:
    model, rows = table_model(kind).float(), table_rows()
    rows = (rows[0].float(), rows[1])
    plain = model(*rows)
    assert torch.equal(look(model, rows, tuple(KINDS)).output, plain)


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_maps_are_an_explicit_softmax(changes: dict[str, object]) -> None:
    """The mixed values that the kernel returned are the map times the values."""
    model = make("decoder", **changes)
    (ids,) = inputs("decoder", 3)
    ids[0, -2:] = 0
    seen = look(model, ids, ("maps", "heads", "reads"))
    for step in find_sublayers(model):
        if not step.heads:
            continue
        attention, weights = step.sublayer, seen.maps[step.name]
        linear = attention.input
        values = linear(seen.reads[step.name]).split(attention.sizes, dim=-1)[2]
        values = attention.split(values).repeat_interleave(
            attention.heads // attention.kv_heads, dim=1
        )
        if attention.persistent is not None:
            learned = attention.persistent(len(values))[1]
            learned = learned.repeat_interleave(attention.heads // attention.kv_heads, dim=1)
            values = torch.cat((values, learned), dim=2)
        close((weights @ values).transpose(1, 2).flatten(2), seen.heads[step.name])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("positions", slow_except(("sinusoidal", "relative"), POSITIONS))
def test_rows_sum_to_1_over_visible_keys(mode: str, positions: str) -> None:
    model, batch = make(mode, positions=positions), inputs(mode)
    batch[-1][0, -2:] = 0
    seen = look(model, batch)
    assert set(seen.maps) == {step.name for step in find_sublayers(model) if step.heads}
    for name, weights in seen.maps.items():
        close(weights.sum(dim=-1), torch.ones_like(weights[..., 0]))
        if name.startswith("decoder") and name.endswith(".attention"):
            assert float(weights.triu(1).abs().max()) == 0
        if name.startswith(mode.split("-")[-1]) and not name.endswith(".memory"):
            assert float(weights[0, :, :, -2:].abs().max()) == 0  # padding


def test_only_what_was_asked_for_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    import addnorm.layers.attention as attention

    calls = []
    original = attention.attention_weights

    def counting(*args: object) -> torch.Tensor:
        calls.append(1)
        return original(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(attention, "attention_weights", counting)
    model, (ids,) = make("decoder", depth=3), inputs("decoder")
    seen = look(model, ids, "maps:decoder.1.attention.2")
    assert len(calls) == 1
    assert {name: each.shape[1] for name, each in seen.maps.items()} == {"decoder.1.attention": 1}
    whole = look(model, ids, "maps:decoder.1.*")
    assert torch.equal(whole.maps["decoder.1.attention"][:, 2:3], seen.maps["decoder.1.attention"])
    assert not seen.branches and not seen.stream and not seen.norms


def test_no_hook_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("encoder-decoder")

    def hooks(model: Model) -> int:
        each = (len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
        return sum(each)

    look(model, inputs("encoder-decoder"), tuple(KINDS))
    with pytest.raises(InputError):
        look(model, (torch.full((1, 3), 99), torch.full((1, 3), 1)), tuple(KINDS))
    assert hooks(model) == 0


def test_the_stream_is_what_the_branches_left() -> None:
    model, (ids,) = make("decoder", addnorm="pre"), inputs("decoder")
    seen = look(model, ids, ("stream", "branches"))
    close(
        seen.stream["decoder.0.attention"],
        seen.stream["decoder.input"] + seen.branches["decoder.0.attention"],
    )


def test_a_large_capture_states_its_size() -> None:
    model = make("decoder").float()
    with pytest.raises(InputError, match=r"needs 5.5 MB.*limit of 1 MB.*limit=\d+"):
        look(model, torch.ones(50, 60, dtype=torch.long), limit=2**20)


def test_a_refused_capture_names_a_place_that_has_what_was_asked_for() -> None:
    model, ids = make("decoder").float(), torch.ones(1, 3, dtype=torch.long)
    for want in ("maps", "neurons", ("branches", "heads:decoder.0.attention")):
        with pytest.raises(InputError, match=r"needs [\d.]+ (kB|bytes), more.* 1 bytes") as error:
            look(model, ids, want, limit=1)
        advised = re.findall(r"want='(.*?)'", str(error.value))[0]
        assert advised.startswith(want if isinstance(want, str) else want[-1])
        look(model, ids, advised)


def test_a_large_capture_states_its_memory_before_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = make("decoder").float().eval(), torch.ones(50, 60, dtype=torch.long)
    monkeypatch.setattr(sys.modules["addnorm.lens.look"], "LARGE_CAPTURE", 2**20)
    calls: list[str] = []
    model.register_forward_pre_hook(lambda *_: calls.append("model"))
    monkeypatch.setattr("warnings.warn", lambda text, stacklevel: calls.append(text))
    look(model, ids)
    assert calls == ["this capture takes about 5.5 MB of memory.", "model"]
    look(model, ids, limit=2**30)  # whoever sets the limit knows the size
    assert calls[2:] == ["model"]
    decompose(model, ids)
    assert calls[3].startswith("this decomposition takes about") and calls[4:] == ["model"]


@pytest.mark.parametrize(
    ("want", "message"),
    (
        ("mapps", "look has no kind 'mapps'. Did you mean 'maps'"),
        ("maps:decoder.7.attention", "no place of this model is named 'decoder.7.attention'"),
        ("maps:decoder.0.attention.4", "has 4 heads, numbered from 0: got head 4"),
        ("neurons:decoder.0.attention", "no place of this model"),
    ),
)
def test_mistakes_are_explained(want: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        look(make("decoder"), torch.tensor([[1, 2]]), want)


def test_a_model_of_others_is_refused() -> None:
    with pytest.raises(InputError, match="needs a model of addnorm"):
        look(torch.nn.Linear(2, 2), torch.zeros(1, 2))


def test_names_in_the_docs_are_there_without_further_imports() -> None:
    text = (Path(__file__).parents[2] / "docs" / "lens.md").read_text("utf-8")
    assert set(re.findall(r"`lens\.([a-z_]+)", text)) <= {*lens.__all__}
