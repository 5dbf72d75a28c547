"""The cells of a stanza: what a row of a TOML file may say, and the field of `Family` that each cell fills.

A file holds the rows of a lineage, a stanza each. The stanza's name is the row's name, and its model_type unless
`types` says more; `[whisper.encoder]` is the row of a tower. A stanza says what differs from the row that it is `like`:
a cell that it names is replaced, all others are inherited. `false` takes a cell away, and `"null"` is null where a
value of the config is meant.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Cell:
    """One cell: its name in a stanza, with its group; the field, or part of a field, that it fills; its meaning."""

    name: str
    field: str
    meaning: str


CELLS = {
    cell.name: cell
    for cell in (
        # Where the layers are.
        Cell("prefixes", "prefixes", "what may stand before every tensor's name; the first that fits is taken"),
        Cell("layer", "layer", "a layer's name before its modules, with {i} for its index"),
        Cell("part", "nested", "key of the part of config.json that describes this stack, where there is one"),
        # The projections.
        Cell("heads.layout", "layout", "how heads lie in the projections: separate, stacked, grouped, latent ..."),
        Cell("heads.modules", "query", "the four projections: self_attn.{q,k,v,o}_proj"),
        Cell("heads.qkv", "query", "the module that holds queries, keys and values, where one does"),
        Cell("heads.q", "query", "module of the queries, where the others are inherited; heads.k, v and out likewise"),
        Cell("heads.k", "key", "module of the keys"),
        Cell("heads.v", "value", "module of the values"),
        Cell("heads.out", "output", "module of the output"),
        Cell("heads.others", "others", "further modules that the layout reads"),
        Cell("heads.loose", "loose", "tensors of a layer that it reads and that belong to no module"),
        Cell("heads.shared", "shared", "tensors of the model that every layer reads"),
        Cell("heads.ignored", "ignored", "modules within attention that heads are not computed from"),
        Cell("heads.transposed", "transposed", "modules whose weights are stored as (in, out)"),
        Cell("heads.bias", "biases", "true, false or the config key that says so; or { qkv = true, out = false }"),
        Cell("heads.kv_heads", "kv_heads", "config keys of the number of key-value heads, or that number"),
        Cell("heads.head_dim", "head_dim", "config keys that add up to a head's width; else d / H"),
        Cell("heads.value_dim", "value_dim", "config keys that add up to the width of a head's values"),
        # Norms, each "rms:module" or "layer:module", or { norm = "rms:module", offset = 1 }.
        Cell("norms.before", "norm", "the norm that feeds attention"),
        Cell("norms.after", "closing", "the norm that a layer's output has passed (post-norm models)"),
        Cell("memory", "memory", "true in cross-attention; or { norm = ... }, the layer's norm of its second input"),
        # The residual stream's ends.
        *(
            Cell(f"inputs.{part}", f"inputs__{part}", meaning)
            for part, meaning in {
                "tokens": "token embedding tensor",
                "positions": "learned position embedding tensor",
                "formula": "makes the rows of positions where no file stores them",
                "positions_batched": "the position embedding has a leading axis of one",
                "offset": "row of position 0, or the config key of the row before it",
                "types": "token-type embedding tensor; its row 0 is added",
                "width": "config key of the embedding's width",
                "before": "projection to the model's width before the norm, where widths differ",
                "after": "projection to the model's width after the norm, where widths differ",
                "always_projected": "`after` is there even where the widths are equal",
                "norm": "a norm of the sum",
                "scale": "factor on token rows, its config key, or sqrt for the root of the width",
                "more": "what else enters the first layer, in words",
            }.items()
        ),
        Cell("inputs.leading", "leading", "kinds of token before an image's patches: [[kind, number or config key]]"),
        Cell("outputs.norm", "outputs__norm", "the final norm"),
        Cell("outputs.tokens", "outputs__tokens", "unembedding tensor, the first of these that is there"),
        Cell("outputs.after", "outputs__after", "projection to the embedding's width before the unembedding"),
        # Positions.
        Cell("positions.rope", "rope", "rotary positions, and the dialect of their config keys"),
        Cell("positions.grid", "rope", "rotation by row and column"),
        Cell("positions.grid_in_windows", "rope", "rotation by row and column within windows"),
        Cell("positions.bias", "additive", "a term by distance: alibi, distances (T5's buckets), window_table ..."),
        # Scores.
        Cell("scores.scale", "scale", "what multiplies scores, 1 / sqrt(head_dim) unless it is named"),
        Cell("scores.qk_norm", "qk_norm", "the norm of queries and keys; true for q_norm and k_norm, one gamma a head"),
        # The feed-forward network; not inherited, but `mlp = true` is that of the row it is like.
        *(
            Cell(f"mlp.{part}", f"mlp__{part}", meaning)
            for part, meaning in {
                "up": "module that leads to the hidden width",
                "down": "module that leads back",
                "gate": "act(x gate) * (x up) enters `down`; `up` again where one tensor holds both",
                "norm": "the norm before them",
                "after_attention": "of post-norm models: the norm between attention and the network",
                "attention_norm": "the norm that attention's output passes before it joins the stream (Gemma 2)",
                "output_norm": "the norm that the network's output passes before it joins the stream",
                "activation": "where the config does not say it",
                "activation_keys": "config keys that say it",
                "bias": "the maps have one; or the config key that says so",
                "transposed": "weights are stored as (in, out)",
                "causal": "a token sees none that comes after it",
                "known": "false where the config asks for a layer that no cell describes",
            }.items()
        ),
        Cell("parallel", "parallel", "attention and the network read the same stream"),
        # The config.
        Cell("config.keys", "keys", "config keys of sizes where they are unusual: { n_layers = \"depth\" }"),
        Cell("config.defaults", "defaults", "what config.json may leave out, if no class says it"),
        Cell("config.derived", "derived", "values that follow from others: the sizes of one stage"),
        Cell("config.sizes", "sizes", "values that differ in one layer"),
        Cell("config.listed", "listed", "config key of the list of the layers' types"),
        Cell("config.layer_types", "layer_types", "the layers' types where the config does not list them"),
        Cell("config.attention_types", "attention_types", "types of layers that are attention; all unless it is named"),
        Cell("config.stored_layer", "stored_layer", "under which index a layer's tensors are"),
        Cell("config.attentions", "attentions", "layers of attention in each layer of the model"),
        # Formats.
        Cell("images", "images", "how photographs are prepared: transformers' image processor and its settings"),
        Cell("in_transformers", "in_transformers", "cells that differ in transformers' own model: { heads.q = ... }"),
        *(
            Cell(f"gguf.{part}", f"gguf__{part}", meaning)
            for part, meaning in {
                "architecture": "what a GGUF file calls this row; the row that says it reads such files",
                "modules": "ggml's names of modules and theirs here, added to those of the row it is like",
                "undo": "how weights of a module become what they were",
                "config": "values of config.json that have no key of their own in a GGUF file",
                "renamed": "modules that differ where the file has a module of this name",
                "experts": "feed-forward networks may be mixtures",
            }.items()
        ),
        # Notes and refusals for users, and conditions that change cells.
        Cell("notes", "caveats", "what else the matrices leave out"),
        Cell("refused", "refused", "why such a model is not read"),
        Cell("when", "variants", "[{ key, is or is_not, cells ... }]: cells that change with a value of the config"),
        Cell("in", "in_layers", "[{ layers, cells ... }]: cells that differ in layers of a type"),
    )
}  # fmt: skip
GROUPS = {name.partition(".")[0] for name in CELLS if "." in name} | {"steps"}
OWN = ("like", "name", "types", "alias")  # what a stanza says of itself; nothing of it is inherited
STEPS = "steps"  # group of the rare mechanisms, a cell for each by the names of `steps.step_classes`
STATED = ("gguf", "mlp")  # groups that only the row has that states them; `true` takes those of the row it is like
CONDITIONS = {"when": (("key", "is"), ("key", "is_not")), "in": (("layers",),)}  # what each may begin with
NULL = "null"

# The rows that stanzas of other files may start from.
ROOTS = (
    "gpt2", "llama", "bert", "vit", "clip.vision", "t5.encoder", "t5.decoder", "t5.cross", "bart.encoder",
    "bart.decoder", "bart.cross",
)  # fmt: skip
