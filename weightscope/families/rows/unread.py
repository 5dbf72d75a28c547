"""Architectures that no row can describe, and the mechanism that stands in the way."""

STATE_SPACES = "has no attention: its layers are state spaces"
BLOCKS = "attends in pieces that are looked up by hashing or landmarks, so that there is no score of every pair"
MASKED = "has a decoder whose layers cross to the levels of an image in turn, for which there is no row"

CONVOLVED = "convolves keys and values over tokens between their projections and attention"
OVER_DEPTH = f"{CONVOLVED}, and adds up what layers before gave by attention over depth"
TWO_STREAMS = "has one block at many places, which reads the residual stream and the embeddings side by side"

UNREAD = {
    **dict.fromkeys(("zaya", "inkling_text"), CONVOLVED),
    "inkling2_text": OVER_DEPTH,
    **dict.fromkeys(("zamba", "zamba2"), TWO_STREAMS),
    "moshi_depth": "has projections of their own for every codebook, that is for every position",
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba"), STATE_SPACES),
    "rwkv": "has no attention: it mixes tokens by recurrence",
    "xlstm": "has no attention: it mixes tokens by recurrence",
    "fnet": "has no attention: it mixes tokens by Fourier transforms",
    "reformer": BLOCKS,
    "nystromformer": "approximates attention through landmarks and adds a convolution of values",
    "mra": BLOCKS,
    "yoso": "samples attention by hashing, without a softmax",
    "longformer": "has further queries, keys and values for tokens of global attention",
    "convbert": "convolves values by kernels of the query beside attention",
    "mobilebert": "attends in a bottleneck: its heads write to a narrower stream than the one they read",
    "funnel": "pools its queries from block to block",
    "layoutlmv3": "adds biases by where two tokens stand on a page",
    "cvt": "has layers of several widths, and a convolution of patches before queries, keys and values are made",
    "lilt": "adds the scores of a second stream, of where tokens stand on a page, to those of text",
    "bros": "adds terms of a query and where the key stands on the page",
    "neomme": "mixes the first layer's input and values of the vocabulary into every layer",
    "patchtst": "has batch norms before attention: means and variances of its training, not of a token",
    "patchtsmixer": "has no attention: gates weigh patches and channels",
    "timesfm2_5": "multiplies queries by learned gains of dimensions after their rotation and their norm",
    "autoformer": "correlates whole series of queries and keys: it has a score a delay, not one a pair",
    "prophetnet": "has further streams of queries, one for each token ahead, with biases by distance of their own",
    "cpmant": "adds a bias that depends on which segments two tokens are in",
    "gemma3n_audio": "attends within chunks, with keys of distances in each",
    "gemma4_audio": "attends within chunks, with keys of distances in each",
    **dict.fromkeys(("hiera", "sam2_vision_model", "sam2_hiera_det_model"), "pools queries from stage to stage"),
    **dict.fromkeys(("mask2former", "oneformer"), MASKED),
    **dict.fromkeys(("mlcd_vision_model", "mlcd"), "learns the angles by which its class token turns"),
    "vjepa2": "turns the two dimensions of a pair by different angles, which is no rotation",
    "timesformer": "attends over time and over space in turn within a layer",
    "mobilevitv2": "has one score a token, not one a pair",
    "levit": "adds a bias by offset in attention whose values are wider than keys, between layers of several widths",
    "eomt_dinov3": "puts queries before the patches in its later layers, where rotation leaves them out",
}
