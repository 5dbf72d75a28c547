"""Architectures that no row can describe, and the mechanism that stands in the way."""

STATE_SPACES = "has no attention: its layers are state spaces"
BLOCKS = "attends in pieces that are looked up by hashing or landmarks, so that there is no score of every pair"

UNREAD = {
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba"), STATE_SPACES),
    "rwkv": "has no attention: it mixes tokens by recurrence",
    "xlstm": "has no attention: it mixes tokens by recurrence",
    "fnet": "has no attention: it mixes tokens by Fourier transforms",
    "reformer": BLOCKS,
    "nystromformer": "approximates attention through landmarks and adds a convolution of values",
    "mra": BLOCKS,
    "yoso": "samples attention by hashing, without a softmax",
    "longformer": "has further queries, keys and values for tokens of global attention",
    "led": "has further queries, keys and values for tokens of global attention in its encoder",
    "convbert": "convolves values by kernels of the query beside attention",
    "mobilebert": "attends in a bottleneck: its heads write to a narrower stream than the one they read",
    "funnel": "pools its queries from block to block",
    "canine": "attends locally to characters, and to what they are pooled to",
    "lilt": "adds the scores of a second stream, of where tokens stand on a page, to those of text",
    "bros": "adds terms of a query and where the key stands on the page",
    "vits": "adds values of distances to what a head gathers",
    "neomme": "mixes the first layer's input and values of the vocabulary into every layer",
    "wavlm": "gates its relative-position biases by the query",
    "speecht5": "adds keys of distances that all layers share, to what a query meets",
    "cpmant": "adds a bias that depends on which segments two tokens are in",
    "granite_speech_encoder": "attends within blocks, with keys of distances in each",
    "gemma3n_audio": "attends within chunks, with keys of distances in each",
    "gemma4_audio": "attends within chunks, with keys of distances in each",
}
