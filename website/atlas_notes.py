"""When to use each variant: one or two sentences for its page of the atlas, with their reason."""

ARRANGEMENTS = {
    "post": "To reproduce the original, BERT or Marian, at up to about 12 blocks and with warm-up. "
    "The last norm bounds the output, and every branch keeps a visible share of the stream.",
    "pre": "By default for anything deep: it trains at any depth and without warm-up. Branches of "
    "late blocks add little to a stream that has grown.",
    "res-post": "For large models whose branches must stay bounded: each adds a vector of fixed "
    "norm, and no activation can blow up the stream (Swin v2, OLMo 2).",
    "sandwich": "For pre-norm in half precision, where branches would overflow.",
    "peri": "Like sandwich, when the embedding, too, should enter with unit variance: variance "
    "grows linearly with depth from a known start.",
    "admin": "For deep post-norm at the usual learning rate: ω is measured once, on your first "
    "batch, and `addnorm.fold` removes it after training.",
    "b2t": "For deep post-norm with nothing to measure or tune: one more addition for each block.",
    "dlcl": "For very deep encoders: every block reads a learned mix of all earlier outputs.",
    "deepnorm": "For post-norm of hundreds of blocks, by two constants that depend on the depth "
    "alone.",
    "rezero": "When every block should start as the identity and a norm is not wanted.",
    "layerscale": "For deep image Transformers (CaiT), or to fine-tune with new blocks that start "
    "almost as the identity.",
    "t-fixup": "To train without norm and without warm-up on small data, by initial weights alone.",
    "fixup": "To ask what a norm is needed for: none is left, three scalars take its place.",
    "scaled": "For comparison: the factor λ of every shortcut multiplies, so gradients explode or "
    "vanish with depth.",
    "none": "For comparison: what a network without shortcuts does. It does not train when deep.",
    "normformer": "For larger learning rates and faster pretraining of pre-norm decoders, at less "
    "than one percent of parameters.",
    "sub-ln": "When one architecture has to serve text, images and speech (Magneto), with "
    "initial weights that depend on the depth.",
    "dual": "When both the gradients of pre-norm and the diverse representations of post-norm are "
    "wanted; the stream is kept twice.",
    "mix": "When the deep half of a pre-norm model contributes too little: post-norm in the first "
    "quarter gives early blocks larger gradients.",
    "lns": "For the same reason as mix, without a new hyperparameter: the input of block l is "
    "divided by √l.",
    "parallel": "For speed: both branches of a block read the same input, so their matrices can "
    "be multiplied at once (GPT-J, PaLM).",
    "hyper": "For deep language models that may keep several copies of the stream and learn how "
    "to mix them.",
}
NORMS = {
    "layer": "By default, and for published models up to GPT-2 and BERT.",
    "rms": "In new language models (T5, Llama): as good as layer norm in practice, without a mean "
    "and an offset.",
    "rms-offset": "To open Gemma's weights; weight decay pulls the gain to 1 instead of 0.",
    "scale": "When few parameters matter: one scalar for each norm (Nguyen and Salazar's small "
    "translation models).",
    "batch": "For comparison: the rows of a batch are no longer independent of one another.",
    "instance": "For comparison, in encoders only: it averages over the sequence, so a position "
    "would see the future.",
    "none": "With arrangements that replace the norm (rezero, fixup, t-fixup), and for comparison.",
}
POSITIONS = {
    "sinusoidal": "By default: nothing to learn, any length.",
    "learned": "To open GPT-2, BERT or BART; longer inputs than `model.length` are refused.",
    "rotary": "In new language models: scores depend on the distance alone; `stretch` extends "
    "trained models to longer texts (Llama).",
    "linear-bias": "For texts longer than those of training: a linear penalty on distance, nothing "
    "to learn (ALiBi).",
    "buckets": "To open T5; distances share learned biases in logarithmic buckets.",
    "relative": "With segment memory: the distance to a cached position is what matters "
    "(Transformer-XL).",
    "index": "For comparison: one direction of the stream for all positions, which fails.",
    "concatenated": "For comparison with addition: positions have coordinates of their own.",
    "none": "For sets, and for tables, whose columns have names; a causal decoder can still infer "
    "positions from how much it sees.",
}
FFNS = {
    "relu": "The original; the sparsest, so that neurons are easy to read.",
    "gelu": "BERT and ViT: smooth at 0.",
    "gelu-tanh": "GPT-2's approximation of gelu; for its weights.",
    "silu": "A smooth alternative that is cheap to compute (also called swish).",
    "glu": "The original gate, with a sigmoid.",
    "reglu": "A gate that can be exactly 0: FT-Transformer for tables.",
    "geglu": "T5 v1.1 and new encoders: better loss for the same parameters (Shazeer 2020).",
    "geglu-tanh": "Gemma's gate; for its weights.",
    "swiglu": "In new language models (Llama, PaLM): the usual choice for decoders.",
    "product-key": "For very many parameters at little computation: a few of n² values are read "
    "for each position.",
    "all-attention": "To have one kind of sublayer only: learned keys and values join the "
    "sequence in one softmax.",
}
KINDS = {
    "arrangements": ("addnorm", "Arrangement", ARRANGEMENTS),
    "norms": ("norm", "Norm", NORMS),
    "positions": ("positions", "Position scheme", POSITIONS),
    "ffns": ("ffn", "Feed-forward network", FFNS),
}
"""By folder: the field of the configuration, the title, and the notes."""
ACTIVATIONS = {
    "relu": "max(0, x)",
    "gelu": "x Φ(x), Φ the normal distribution function (Hendrycks, Gimpel 2016, 1606.08415)",
    "gelu-tanh": "½ x (1 + tanh(√(2/π) (x + 0.044715 x³))), an approximation of x Φ(x) "
    "(Hendrycks, Gimpel 2016, 1606.08415, §2)",
    "silu": "x / (1 + e^−x) (Elfwing et al. 2017, 1702.03118)",
    "glu": "1 / (1 + e^−x) (Dauphin et al. 2016, 1612.08083)",
    "reglu": "max(0, x)",
    "geglu": "x Φ(x), Φ the normal distribution function",
    "geglu-tanh": "½ x (1 + tanh(√(2/π) (x + 0.044715 x³)))",
    "swiglu": "x / (1 + e^−x)",
}
"""σ of the feed-forward networks."""
