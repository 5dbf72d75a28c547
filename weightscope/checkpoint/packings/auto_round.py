"""AutoRound: GPTQ's or AWQ's order, codes of 2 to 8 bits in one stream, g_idx if needed."""

from collections.abc import Mapping
from functools import cached_property

import numpy as np

from weightscope.checkpoint.checkpoint import StoredTensor
from weightscope.checkpoint.config import Config
from weightscope.checkpoint.packings.gptq import AWQ_ORDER, GroupedTensor
from weightscope.checkpoint.packings.packed import FLOATS, DequantisedTensor, parts_of, unpacked
from weightscope.core.errors import CheckpointError

# Difference of the zero that is meant to the stored one, by packing_format; None: AWQ's order.
ZERO_OFFSETS = {
    "auto_round:auto_gptq": 1,
    "auto_round": 0,
    "auto_round:gptqmodel": 0,
    "auto_round:auto_awq": None,
}
BITS = range(2, 9)
ROWS = 256  # unpacked at a time, so that only the result has the result's size


def check(settings: Config) -> None:
    """Refuse packings that are not read."""
    packing = settings.get("packing_format")
    if not isinstance(packing, str) or packing not in ZERO_OFFSETS:
        problem = f"says packed by AutoRound as '{str(packing)[:40]}', which is not read"
        raise CheckpointError(f"{problem}; read are {', '.join(ZERO_OFFSETS)}", file=settings.file)


def find(
    tensor: StoredTensor, stored: Mapping[str, StoredTensor], settings: Config
) -> DequantisedTensor | None:
    """The weight of this tensor, if it is a `qweight`."""
    if not tensor.name.endswith(".qweight"):
        return None
    module = tensor.name.removesuffix(".qweight")
    layers = settings.get("extra_config")
    layer = layers.get(module) if isinstance(layers, dict) else None
    own_size = layer.get("group_size") if isinstance(layer, dict) else None
    offset = ZERO_OFFSETS[settings["packing_format"]]
    known = {"group_size": own_size or settings.get("group_size"), "offset": offset}
    by_key = {"qweight": tensor, **parts_of(module, stored, "qzeros", "scales", "g_idx")}
    kind = AutoRoundAwqTensor if offset is None else AutoRoundTensor
    return kind(f"{module}.weight", by_key, Config(known, settings.file))


def _codes(words: np.ndarray, bits: int) -> np.ndarray:
    """A row's codes, lowest bits first: words (rows, n) -> float32 (rows, n * 32 / bits)."""
    packed = np.ascontiguousarray(words).view(np.uint8).reshape(-1)
    return unpacked(packed, np.arange(1 << bits, dtype=np.float32)).reshape(len(words), -1)


class AutoRoundTensor(GroupedTensor):
    """Codes along the inputs, as GPTQ has them; the shapes say how many bits a code has."""

    @cached_property
    def bits(self) -> int:
        """Bits of a code, by the zeros of a group: one for each output."""
        zeros, scales = self.by_key["qzeros"].shape, self.by_key["scales"].shape
        return zeros[1] * 32 // max(scales[1], 1)

    @property
    def dtype(self) -> str:
        has_bits = {"qzeros", "scales"} <= {*self.by_key}
        return f"AutoRound int{self.bits}" if has_bits else "AutoRound"

    @property
    def shape(self) -> tuple[int, ...]:
        words, outputs = self.by_key["qweight"].shape
        return outputs, words * 32 // self.bits

    def sizes(self) -> tuple[int, int, int]:
        """Outputs, inputs and groups, checked to fit together."""
        for key, dtypes in (("qweight", ("I32",)), ("qzeros", ("I32",)), ("scales", FLOATS)):
            if key not in self.by_key:
                raise self.refuse(f"has no {key}; AutoRound's packing needs one")
            if self.by_key[key].dtype not in dtypes or len(self.by_key[key].shape) != 2:
                self.misshapen()
        outputs, bits = self.by_key["scales"].shape[1], self.bits
        if bits not in BITS or self.by_key["qzeros"].shape[1] * 32 != outputs * bits:
            self.misshapen()
        return *self.shape, self.by_key["scales"].shape[0]  # type: ignore[return-value]

    def check(self) -> None:
        outputs, inputs, n_groups = self.sizes()
        words, zeros = self.by_key["qweight"].shape, self.by_key["qzeros"].shape
        if (words[0] * 32, words[1]) != (inputs * self.bits, outputs) or zeros[0] != n_groups:
            self.misshapen()
        if inputs % 32:
            raise self.refuse(f"has {inputs} inputs; AutoRound packs 32 of them at a time")
        self.check_groups()

    def dequantise(self) -> np.ndarray:
        groups, words = self.groups(), self.words("qweight")
        scales = self.by_key["scales"].read().T  # (out, n_groups)
        zeros = _codes(self.words("qzeros"), self.bits).T + np.float32(self.settings["offset"])
        w = np.empty(self.shape, np.float32)
        for start in range(0, len(w), ROWS):
            rows = slice(start, start + ROWS)
            codes = _codes(words[:, rows].T, self.bits)
            w[rows] = (codes - zeros[rows][:, groups]) * scales[rows][:, groups]
        return w


class AutoRoundAwqTensor(AutoRoundTensor):
    """Codes along the outputs, eight at a time in AWQ_ORDER."""

    @property
    def shape(self) -> tuple[int, ...]:
        inputs, words = self.by_key["qweight"].shape
        return words * 32 // self.bits, inputs

    def check(self) -> None:
        outputs, _, n_groups = self.sizes()
        scales, zeros = self.by_key["scales"].shape, self.by_key["qzeros"].shape
        if scales[1] != outputs or zeros[0] != n_groups or outputs % 8:
            self.misshapen()
        self.check_groups()

    def dequantise(self) -> np.ndarray:
        in_order = np.argsort(AWQ_ORDER)

        def unpack(words: np.ndarray) -> np.ndarray:
            codes = _codes(words, self.bits)
            return codes.reshape(len(codes), -1, 8)[:, :, in_order].reshape(codes.shape)

        groups, words, scales = self.groups(), self.words("qweight"), self.by_key["scales"].read()
        zeros = unpack(self.words("qzeros"))
        w = np.empty(self.shape[::-1], np.float32)  # (in, out)
        for start in range(0, len(w), ROWS):
            rows = slice(start, start + ROWS)
            w[rows] = (unpack(words[rows]) - zeros[groups[rows]]) * scales[groups[rows]]
        return w.T
