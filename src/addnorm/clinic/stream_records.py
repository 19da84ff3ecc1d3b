"""The residual stream of one forward pass, as records: sites, states of the stream, rescalings."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge

from addnorm.clinic.forward_stats import ForwardStats


@dataclass(frozen=True)
class Rescaling:
    """What a norm or a factor does to a part c of the stream: c ← factor ⊙ (c − mean c)."""

    factor: Tensor | float
    centred: bool = False
    """Subtract the mean first."""

    def __call__(self, component: Tensor) -> Tensor:
        if self.centred:
            component = component - component.mean(dim=-1, keepdim=True)
        return self.factor * component


@dataclass
class StreamNode:
    """A state of the stream: the rescaled sum of its parents, plus one branch."""

    parents: list[tuple[int, tuple[Rescaling, ...]]]
    site: int | None = None
    start: Tensor | None = None


@dataclass
class Site:
    """One sum where a branch joins the stream.

    Parameters
    ----------
    name : name of the site
    path : the module in whose forward pass the sum is computed
    branch_path : the module that computes the branch
    role : attention, memory or ffn
    shortcut : the shortcut a
    branch : the branch b
    total : their sum
    sign : +, or − if one is subtracted from the other
    node : the node of the stream after the sum
    weights : names of the parameters that the branch uses
    shortcut_norm : the norm that computes the shortcut, if one does
    norm_of_stream : whether that norm reads an earlier sum, rather than the embedding
    read_norm : the norm through which the branch reads the shortcut
    branch_norm : the norm that ends the branch
    factor : constant that the shortcut was multiplied by since the last sum or norm
    gated : whether shortcut or branch is multiplied by a gate that is computed from the input
    scaled : whether the shortcut is multiplied by one constant or learned number
    parallel : whether the block's other branch reads the same stream as this one
    linear : whether two or more matrices of a feed-forward branch have nothing between them
    cut : whether the shortcut, or all of the branch, was detached from what it was computed from
    edge : the sum in the graph of the backward pass, if its memory was overwritten since
    """

    name: str
    path: str
    branch_path: str
    role: str
    shortcut: Tensor
    branch: Tensor
    total: Tensor
    sign: str
    node: int
    weights: tuple[str, ...]
    shortcut_norm: str | None = None
    norm_of_stream: bool = False
    read_norm: str | None = None
    branch_norm: str | None = None
    factor: float = 1.0
    gated: bool = False
    scaled: bool = False
    parallel: bool = False
    linear: bool = False
    cut: bool = False
    edge: GradientEdge | None = None

    @property
    def arrangement(self) -> str:
        """Where the norms of this site stand: post, pre, res-post, sandwich or none."""
        if self.shortcut_norm is not None and self.norm_of_stream:
            return "post"
        if self.read_norm is not None:
            return "sandwich" if self.branch_norm is not None else "pre"
        return "none" if self.branch_norm is None else "res-post"


@dataclass
class Trace:
    """The residual stream of one forward pass.

    Parameters
    ----------
    sites : every site, in forward order
    nodes : every state of the stream
    normed : each norm of the stream: its module, and the node that it reads
    normed_sites : sites whose sum, or what is pooled or picked from it, is read by a norm
    used_sites : sites that the output is computed from
    mixing : modules that compute a product of activations, as attention does
    misnormed : modules of attention whose weights sum to 1 over another axis than the keys
    multiplied : parameters of matrix products
    embeddings : parameters that token ids are looked up in
    unknown_sums : operations outside torch that take the stream and a branch
    hidden_shortcuts : modules of attention around which a shortcut passes that no sum shows
    restarts : sites that begin a stream of their own, computed from the sum of an earlier site
    head : the parameters of the last matrix product before the output
    dropouts : the largest probability of dropout, and its module (0 in evaluation mode)
    stats : statistics of the forward pass
    output : the model's own output
    """

    sites: list[Site] = field(default_factory=list)
    nodes: list[StreamNode] = field(default_factory=list)
    normed: list[tuple[str, int]] = field(default_factory=list)
    normed_sites: set[int] = field(default_factory=set)
    used_sites: set[int] = field(default_factory=set)
    mixing: list[str] = field(default_factory=list)
    misnormed: list[str] = field(default_factory=list)
    multiplied: set[str] = field(default_factory=set)
    embeddings: set[str] = field(default_factory=set)
    unknown_sums: list[str] = field(default_factory=list)
    hidden_shortcuts: list[str] = field(default_factory=list)
    restarts: set[int] = field(default_factory=set)
    head: tuple[str, ...] = ()
    dropouts: tuple[float, str] = (0.0, "")
    stats: ForwardStats = field(default_factory=ForwardStats)
    output: Any = None
