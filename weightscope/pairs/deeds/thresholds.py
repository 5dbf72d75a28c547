"""Thresholds by which a change is called something, each with its reason.

All questions ask the same functions of this room, so a pair that one calls moved, rounded or copied
is called so by the others. How grids, ranks and directions are searched for is set where
they are searched for.
"""

from typing import NamedTuple

# Distances: |B - A| / |A| in the Frobenius norm.
# maps of an unmoved head: float32's rounding of the factors' products
UNMOVED = 1e-5
# and where the stream's rotation was found from float32 embeddings
UNMOVED_IN_ANOTHER_BASIS = 1e-3
CONVERTED = 1e-6  # a tensor after a conversion's own arithmetic
# projections of a copied layer; a cast to bfloat16 makes 0.002
COPIED = 0.01
# a quantised matrix; a grid of three values makes 0.44
QUANTISED = 0.5
# a matrix whose rows may be A's in another order, at least; unrelated rows make 1.41
REORDERED = 0.5
SAME_SIZE = 1e-5  # root mean squares, which no rotation or permutation changes
SAME_NORMS = 1e-3  # sorted norms of rows; rows in another order have A's norms
FAR = 0.9  # heads with nothing in common as they are stored; strangers make 1.41
NEAR = 0.5  # heads that are the same but for rounding or tuning, in one basis
SAME_SPECTRA = 0.1  # |s_b - s_a| / s_1 of heads' singular values, which no basis changes
OTHER_FACTORS = 0.01  # heads' factors whose basis may have been changed, at least
# and times the change of their products; a tuned head's factors move as far as these
THAN_MAPS = 3.0

# Cosines.
# sketches of two heads' spaces that are then compared exactly; equal ones have 1
LIKELY_SAME = 0.99
SHARED_ROWS = 0.5  # sampled rows outside heads; strangers' never reach it
SHARED_GAINS = 0.9  # most norms' gains, apart from their mean
MAYBE_SHARED = 0.2  # the same, where it is no longer called chance
# matrices of two layers of one checkpoint that may be copies; strangers have 0
NEAR_COPY = 0.3
# rows of an expert or a moved neuron and of its original
COPIED_AND_TUNED = 0.9
TUNED = 0.5  # a tuned matrix before and after; weights trained apart have about 0
PARALLEL = 0.99  # two directions that are called one
# a change along a direction and what was there, which is then what was subtracted; LoRAs have 0
OWN = 0.99
# largest component of a direction that is a dimension: a zero row of a matrix may have been added
ONE_DIMENSION = 0.99

# Shares.
FEW_ROWS = 0.1  # rows of a tensor that changed, where the change is described by them
# layers with a counterpart, or matrices with coarser values, for that to be named
MOSTLY = 0.5
# matrices on a grid, to be called quantised; fused or small ones are often left out
ON_GRIDS = 0.25
PARTLY = 0.2  # equal values of a changed float32 matrix; training moves all of them
SAME_BASIS = 1e-3  # largest entry of a rotation without the identity, up to which it is none
# matrices outside heads whose size agrees, where a change of basis is suspected
SAME_SIZES = 0.5
# dimensions that a head writes, by which an edge's projection kernel moved
EDGE_MOVED = 0.02
# output of a layer that may have been added, over the median layer's, at most
NEAR_IDENTITY = 0.5
PERMUTED = 0.9  # largest weight in each row of a rotation that is a permutation
# energy of a change in one direction; rounding to bfloat16 adds 1 % in the widest models
NEARLY_ONE_DIRECTION = 0.9
# size left along a direction that was removed wholly, in float32
PROJECTED = 1e-3
# distance of a strength from 1 where all was removed; rounding to bfloat16 makes 0.001
WHOLLY = 0.01
RESCALED = 1000.0  # times a tensor's norm before, or as many times less: no training does that

# Multiples of rounding's error that it explains.
FOLDING = 3.0  # values of both checkpoints that were multiplied by a norm's gain and rounded again
# |error| / |x| of a stored format whose grid does not show in the values: four bits make as much
STORED = 0.1
CLEAR = 2.0  # a change of factors whose rank is computed
EXPLAINED = 2.0  # maps of two rounded factors
# the same if heads' bases changed: rounding weighs more along weak directions
EXPLAINED_IN_ANOTHER_BASIS = 5.0

# Proofs of a copy. Cells that any original would lie in show nothing.
# a stored grid's range that values use; one sign leaves half, a power of two as scale half of it
USED = 1 / 4
STEPS_USED = 8  # steps of an even grid, which are enough: a byte may hold codes of five bits
# finest steps of a float; matrices that share a scale have them, subnormal numbers not
FLOAT_STEPS_USED = 64
# grids of two levels; HQQ shifts them so that all values of a group may have one
TWO_LEVELS_SPARED = 0.1
# |B - A| / |A| of a row, at most, where values may leave their cells: zeros would make 1
KEPT = 0.9
# chance that the values in another order are rounded to the same, at most where a cast is shown
UNLIKELY = 1e-6

# Deeds found block by block.
TAIL = 10.0  # times the usual change of a value: the largest of many that were rounded
# share of a sample's change in one direction, from which the whole is looked at: it may have 0.9
IN_A_SAMPLE = 0.8
LEAST_CHANGED = 8  # values: fewer are multiplied by one factor by chance
LEAST_FACTOR = 1e-4  # from one: a nearer factor is not told from a conversion's noise
# values that any change of its size would move by more than a step, where none moved so far
WITHIN_A_STEP = 32
SMALL_STEP = 1 / 4  # step of such a value over the root mean square of the change, at most
NEARLY_ONE = 4  # rank of a change that may be of rank one: the rest may be rounding

# Deeds found by all values (T(A) = B up to the stored rounding).
EXACT = 2e-6  # |T(A) - B| / |B| of equal float32 arrays: one rounding of each value
FARTHEST = 3.0  # half-steps from where a deed puts a value: quantisers that search reach that
MARGIN = 2.0  # times the error that rounding to the nearest leaves in a row
CLEARER = 0.5  # times the error without a deed, at most, for one to be named
MOSTLY_ONE = 0.5  # share of factors that are one where a few rows or blocks were scaled
WITH_ONE_FACTOR = 8  # values that share a factor, at least
SLIPPED = 2.0  # a factor from which a scale may be missing or applied twice
ONE_FACTOR = 0.1  # difference of logarithms of equal factors, rounded to eight bits
PACKED = 0.2  # |error| / |x| of a packing whose grid is not known
LOWEST = 1 / 8  # rank over full rank; a higher one is lost in a quantised matrix's errors
# times a quantised matrix's mean error: what rows of the largest scale add to a singular value
UNEVEN = 2.0
OF_TOUCHED = 1 / 2  # rank of a low change over the number of rows or columns that changed
SMALLEST_CODES = 7  # the largest of four bits: integers up to here and beyond may be codes

# Bounds of a packing's distance from its original. A change within them is not seen.


class Bounds(NamedTuple):
    """Distances of values from where rounding to the nearest puts them."""

    group: int  # neighbours whose error is judged together; 0: a row
    error: float  # times the error of rounding to the nearest, in each group
    farthest: float  # half-steps from its level, of one value within its grid
    in_cells: float  # the least share of values that are in their cells
    # mean steps off the nearest level, away from zero or towards it, along the original
    leaning: float


# Quantisers that search for a scale, weighted by an importance matrix too; measured on ggml's, see
# `analyses.experiments.faithful_conversions`.
SEARCHED = Bounds(32, 2.0, 3.0, 0.0, 0.003)
# Bounds where only scales are searched: values are in their cells, or beyond the end of a grid
SCALES_SEARCHED = Bounds(32, 2.0, 1.0, 0.0, 0.003)
# GPTQ, which moves values by several steps to make up for the errors of those before; measured on
# llm-compressor's, calibrated on random tokens: rows to 2.7, values to 8.4, 66 % in their cells.
COMPENSATED = Bounds(0, 3.0, 10.0, 0.6, 0.02)
# Squared errors of values within their cells over those beyond, in each row, at least: where all
# others lie on their levels, there was nothing to make up for. llm-compressor's leave 0.12.
PUSHED = 0.02
BEYOND = 20.0  # half-steps beyond the end of its grid
OUTLIERS = 0.05  # share of a row's values that are more than `CLIPPED` beyond
# Types whose groups of 4 or 8 values are entries of a codebook: no value has a cell of its own.
# |error| / |W| that ggml's quantiser makes of normal weights with an importance matrix; a change
# smaller than the error is not seen.
CODEBOOKS = {
    "IQ1_S": 0.55,
    "IQ1_M": 0.52,
    "IQ2_XXS": 0.49,
    "IQ2_XS": 0.37,
    "IQ2_S": 0.28,
    "IQ3_XXS": 0.24,
    "IQ3_S": 0.16,
}
USUAL = 1.25  # times this error, at most
FLUSHED = 2.0**-22  # values that scales in float16 are too coarse for
# Cosines of columns that have nothing in common are about 1 / sqrt(rows); ggml's coarsest codebooks
# leave 0.3.
BY_CHANCE = 3.0  # times that
FEWEST_ROWS = 256  # rows that are enough to ask
AT_ANGLES = 0.01  # of a change's squares: what a projection leaves is at right angles to it
FEWEST_RANKS = 8  # of a matrix, before a lower rank is a cut and not a matter of shape
SHARED = 32  # columns that share a scale
OF_LARGEST = 1 / 4  # size of a column that this scale is made for, over the largest
LEANING = 0.05  # the same as a bound's, of one row or column
NO_CHANCE = 6.0  # times what chance makes of as many values
NOT_ZERO = 1 / 4  # share of a column's values that are nearer another level than zero, at least
