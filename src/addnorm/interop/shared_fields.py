"""Fields and names that the tables of several architectures share."""

from addnorm.interop.mapping import Field

HF_ACTIVATIONS = {
    "gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "gelu_new": "gelu-tanh",
    "gelu_pytorch_tanh": "gelu-tanh",
    "gelu_fast": "gelu-tanh",
}
"""Their names of activations and ours; the first of equals is written."""
GATED = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu-tanh"}
GATED |= {"gelu_new": "geglu-tanh", "relu": "reglu"}
"""Their activations and our gated feed-forwards; the first of equals is written."""
VOCAB = Field("vocab", "vocab_size")
STACK_SIZES = (
    Field("width", "hidden_size"),
    Field("depth", "num_hidden_layers"),
    Field("heads", "num_attention_heads"),
)
"""Sizes of a stack under the names that most architectures use."""
FFN_WIDTH = Field("ffn_width", "intermediate_size")
POSITIONS_2048 = Field("length", "max_position_embeddings", 2048)
