"""Sizes of a model from its architecture: parameters, those that one token uses, the KV cache of a token."""

from dataclasses import dataclass

from nxpipe.pipeline.predict.work import Architecture, NotPredicted

_KINDS = ("decoder", "encoder", "encoder-decoder")


@dataclass(frozen=True)
class ModelSize:
    """Counts of parameters, and of elements that the KV cache holds for each token."""

    parameters: int
    active: int  # of one token: without the experts that it does not choose, and without the table of embeddings
    cache: int

    @classmethod
    def of(cls, a: Architecture) -> "ModelSize":
        """NotPredicted for a kind of model whose parameters have no closed form here."""
        if a["kind"] not in _KINDS:
            raise NotPredicted(f"the parameters of a model of kind {a['kind']} have no closed form")
        hidden, layers, vocabulary = a["hidden"], a["layers"], a["vocab"]
        heads, kv_heads = a["heads"], a.get("kv_heads") or a["heads"]
        head = a.get("head_dim") or hidden // heads
        projections = 3 if a.get("gated", a["kind"] == "decoder") else 2
        attention = hidden * head * (2 * heads + 2 * kv_heads)
        experts, chosen = a.get("experts") or 0, a.get("active_experts") or 0
        outside = attention + hidden * experts  # the router
        if experts:
            outside += projections * hidden * (a.get("shared_intermediate") or 0)
            expert = projections * hidden * a["expert_intermediate"]
            whole, used = outside + expert * experts, outside + expert * chosen
        else:
            whole = used = outside + projections * hidden * a["intermediate"]
        if a["kind"] == "encoder-decoder":  # a decoder's layers attend twice
            whole, used = 2 * whole + attention, 2 * used + attention
        own = 1 if a.get("shared_layers") else layers
        head_table = vocabulary * hidden if a["kind"] != "encoder" else 0
        tables = vocabulary * hidden + (0 if a.get("tied") else head_table)
        return cls(
            parameters=own * whole + tables,
            active=layers * used + head_table,
            cache=2 * layers * kv_heads * head if a["kind"] != "encoder" else 0,
        )
