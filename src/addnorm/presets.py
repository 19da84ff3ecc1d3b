"""Configurations of published models: one function each, with the table it is taken from.

Parameters
----------
size : a size of the published model, where there are several
**changes : fields of ModelConfig to change

Examples
--------
>>> from addnorm import presets
>>> presets.gpt2("medium", depth=6).model.width
1024
>>> presets.find("t5-v1.1-base").model.ffn
'geglu-tanh'
"""

import inspect
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from addnorm.config import Config, ModelConfig
from addnorm.errors import ConfigError, SavedError, nearest
from addnorm.files import read_text
from addnorm.section import load_toml


def base(**changes: Any) -> Config:
    """Transformer base: Vaswani et al. 2017 (1706.03762), table 3; shared vocabulary of 37,000."""
    return _config(
        dict(
            mode="encoder-decoder", vocab=37000, width=512, depth=6, heads=8, attention_bias="none"
        ),
        changes,
    )


def big(**changes: Any) -> Config:
    """Transformer big: Vaswani et al. 2017, table 3, last row."""
    sizes = dict(width=1024, heads=16, ffn_width=4096, dropout=0.3)
    return base(**(sizes | changes))


_GPT2 = {
    "small": dict(width=768, depth=12, heads=12),
    "medium": dict(width=1024, depth=24, heads=16),
    "large": dict(width=1280, depth=36, heads=20),
    "xl": dict(width=1600, depth=48, heads=25),
}


def gpt2(size: str = "small", **changes: Any) -> Config:
    """GPT-2: Radford et al. 2019, table 2 (sizes as released)."""
    common = dict(
        mode="decoder",
        vocab=50257,
        length=1024,
        ffn="gelu-tanh",
        addnorm="pre",
        addnorm_options={"shrink": True},
        positions="learned",
        scale_embedding=False,
        init="normal",
    )
    return _config(common | _sizes_of("gpt2", size, _GPT2), changes)


_BERT = {
    "base": dict(width=768, depth=12, heads=12),
    "large": dict(width=1024, depth=24, heads=16),
}


def bert(size: str = "base", **changes: Any) -> Config:
    """BERT, uncased, with its head for masked tokens: Devlin et al. 2019 (1810.04805), §3."""
    common = dict(
        mode="encoder",
        vocab=30522,
        length=512,
        segments=2,
        ffn="gelu",
        addnorm="post",
        norm_eps=1e-12,
        embed_norm=True,
        positions="learned",
        scale_embedding=False,
        head="masked",
        init="normal",
    )
    return _config(common | _sizes_of("bert", size, _BERT), changes)


_T5 = {
    "small": dict(width=512, depth=6, heads=8, head_width=64, ffn_width=2048),
    "base": dict(width=768, depth=12, heads=12, head_width=64, ffn_width=3072),
    "v1.1-small": dict(width=512, depth=8, heads=6, head_width=64, ffn_width=1024),
    "v1.1-base": dict(width=768, depth=12, heads=12, head_width=64, ffn_width=2048),
}


def t5(size: str = "small", **changes: Any) -> Config:
    """T5: Raffel et al. 2020 (1910.10683), §2.1; v1.1 has a gated FFN and its own output matrix."""
    gated = size.startswith("v1.1")
    common = dict(
        mode="encoder-decoder",
        vocab=32128,
        length=512,
        ffn="geglu-tanh" if gated else "relu",
        tie_embeddings="all",
        attention_bias="none",
        ffn_bias=False,
        attention_scale=1.0,
        norm="rms",
        norm_eps=1e-6,
        addnorm="pre",
        positions="buckets",
        scale_embedding=False,
        scale_output=not gated,
        ffn_dropout=0.1,
    )
    own_output = {"tie_embeddings": "source"} if gated else {}
    return _config(common | own_output | _sizes_of("t5", size, _T5), changes)


def marian(**changes: Any) -> Config:
    """Marian as released by OPUS-MT (en-de, vocabulary 58,101): Tiedemann, Thottingal 2020."""
    common = dict(
        mode="encoder-decoder",
        vocab=58101,
        width=512,
        depth=6,
        heads=8,
        ffn="silu",
        addnorm="post",
        positions="sinusoidal",
        position_options={"layout": "halves"},
    )
    return _config(common, changes)


_BART = {
    "base": dict(width=768, depth=6, heads=12),
    "large": dict(width=1024, depth=12, heads=16),
}


def bart(size: str = "base", **changes: Any) -> Config:
    """BART: Lewis et al. 2020 (1910.13461), §2.1."""
    common = dict(
        mode="encoder-decoder",
        vocab=50265,
        length=1024,
        ffn="gelu",
        addnorm="post",
        embed_norm=True,
        positions="learned",
        position_options={"offset": 2},
        scale_embedding=False,
        init="normal",
    )
    return _config(common | _sizes_of("bart", size, _BART), changes)


_LLAMA: dict[str, dict[str, Any]] = {
    "stories260k": dict(
        vocab=512,
        width=64,
        depth=5,
        heads=8,
        kv_heads=4,
        ffn_width=172,
        length=512,
        tie_embeddings="all",
    ),
    "1b": dict(width=2048, depth=22, heads=32, kv_heads=4, ffn_width=5632, length=2048),
    "7b": dict(width=4096, depth=32, heads=32, ffn_width=11008, length=4096),
}


def llama(size: str = "1b", **changes: Any) -> Config:
    """Llama-style: Touvron et al. 2023 (2307.09288), §2; 1b is TinyLlama (2401.02385), table 1."""
    common = dict(
        mode="decoder",
        vocab=32000,
        ffn="swiglu",
        tie_embeddings="none",
        attention_bias="none",
        ffn_bias=False,
        norm="rms",
        addnorm="pre",
        positions="rotary",
        scale_embedding=False,
        dropout=0.0,
        init="normal",
    )
    return _config(common | _sizes_of("llama", size, _LLAMA), changes)


_VIT = {
    "tiny": dict(width=192, depth=12, heads=3),
    "small": dict(width=384, depth=12, heads=6),
    "base": dict(width=768, depth=12, heads=12),
    "large": dict(width=1024, depth=24, heads=16),
}


def vit(size: str = "base", **changes: Any) -> Config:
    """ViT with patches of 16 pixels: Dosovitskiy et al. 2021 (2010.11929), table 1."""
    common = dict(
        mode="encoder",
        input="patches",
        summary=True,
        ffn="gelu",
        addnorm="pre",
        norm_eps=1e-6,
        positions="learned",
        head="class",
        outputs=1000,
        dropout=0.0,
        init="normal",
    )
    return _config(common | _sizes_of("vit", size, _VIT), changes)


def ft_transformer(**changes: Any) -> Config:
    """Trunk of FT-Transformer: Gorishniy et al. 2021 (2106.11959), default of 3 blocks, ffn 4/3.

    Its input is one vector per column; models/tabular.py has the layers that embed columns.
    """
    common = dict(
        mode="encoder",
        input="vectors",
        summary=True,
        width=192,
        depth=3,
        heads=8,
        ffn="reglu",
        ffn_width=256,
        addnorm="pre",
        addnorm_options={"bare_start": True},
        positions="none",
        dropout=0.0,
        attention_dropout=0.2,
        ffn_dropout=0.1,
        head="class",
        outputs=2,
        pooler="relu",
        init="torch",
    )
    return _config(common, changes)


def tab_transformer(**changes: Any) -> Config:
    """Trunk of TabTransformer: Huang et al. 2020 (2012.06678), §3: 6 blocks, width 32, 8 heads.

    Its input is one vector per categorical column.
    """
    common = dict(
        mode="encoder",
        input="vectors",
        width=32,
        depth=6,
        heads=8,
        ffn="gelu",
        addnorm="post",
        positions="none",
        head="none",
    )
    return _config(common, changes)


def saint(**changes: Any) -> Config:
    """Column stack of SAINT: Somepalli et al. 2021 (2106.01342), §4: 6 blocks, width 32, 8 heads.

    Its input is one vector per column; models/tabular.py adds attention over the rows of the batch.
    """
    common = dict(
        mode="encoder",
        input="vectors",
        summary=True,
        width=32,
        depth=6,
        heads=8,
        ffn="geglu",
        addnorm="pre",
        positions="none",
        head="class",
        outputs=2,
    )
    return _config(common, changes)


PRESETS: dict[str, Callable[..., Config]] = {
    "base": base,
    "big": big,
    "gpt2": gpt2,
    "bert": bert,
    "t5": t5,
    "marian": marian,
    "bart": bart,
    "llama": llama,
    "vit": vit,
    "ft_transformer": ft_transformer,
    "tab_transformer": tab_transformer,
    "saint": saint,
}

SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "gpt2": _GPT2,
    "bert": _BERT,
    "t5": _T5,
    "bart": _BART,
    "llama": _LLAMA,
    "vit": _VIT,
}


def names() -> list[str]:
    """Return the names of all presets, with sizes: `base`, `gpt2-small`, `t5-v1.1-base`, ..."""
    return [
        name
        for preset in PRESETS
        for name in (preset, *(f"{preset}-{size}" for size in SIZES.get(preset, ())))
    ]


def find(target: str | Path, settings: Sequence[str] = ()) -> Config:
    """Return the configuration of a preset, a TOML file or a saved model, with settings applied.

    The name of a preset always means the preset; write `./gpt2` for a directory of that name.
    >>> find("gpt2-medium", ["model.depth=2"]).model.width
    1024
    """
    return _find(target).override(*settings)


def _find(target: str | Path) -> Config:
    path, name = Path(target), str(target)
    if name in names():
        preset, _, size = name.partition("-")
        return PRESETS[preset](*([size] if size else []))
    if path.is_dir():
        path = path / "config.toml"
    if path.suffix == ".toml" or path.exists():
        text = read_text(path)
        return Config.parse(text, base=_base_of(text), source=str(path))
    if "/" in name:
        raise SavedError(f"there is no file or directory {name!r}. Check the path.")
    raise ConfigError(f"there is no preset or file {name!r}. {nearest(name, names())}")


def _base_of(text: str) -> Config | None:
    """Return the preset that a TOML text names as its base, or None."""
    try:
        name = load_toml(text).get("preset")
    except (tomllib.TOMLDecodeError, RecursionError):
        return None  # Config.parse reports the error
    if name is None:
        return None
    if name not in names():
        raise ConfigError(f"preset has no choice {name!r}. {nearest(str(name), names())}")
    return _find(name)


def _sizes_of(name: str, size: str, table: dict[str, dict[str, Any]]) -> dict[str, Any]:
    if size not in table:
        raise ConfigError(f"{name} has no size {size!r}. {nearest(size, table)}")
    return table[size]


def _config(settings: dict[str, Any], changes: dict[str, Any]) -> Config:
    return Config(model=ModelConfig(**settings).replace(**changes))


def summary(name: str) -> str:
    """Return the first line of a preset's docstring."""
    return (inspect.getdoc(PRESETS[name]) or "").partition("\n")[0]
