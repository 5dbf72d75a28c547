"""Writes bitsandbytes.safetensors: weights as bitsandbytes 0.50.2 quantises and saves them, and as it reads them back.

Run it where bitsandbytes is installed: python -m tests.checkpoint.golden.make
"""

from pathlib import Path

import bitsandbytes.functional as bnb
import torch
from safetensors.torch import save_file


def main() -> None:
    tensors = {}
    generator = torch.Generator().manual_seed(0)
    for kind in ("nf4", "fp4"):
        for nested in (False, True):
            for shape in ((48, 64), (6, 50)):  # the second does not fill its last block
                name = f"{kind}{'_nested' if nested else ''}_{shape[0]}"
                w = torch.randn(shape, generator=generator).to(torch.bfloat16)
                packed, state = bnb.quantize_4bit(w, blocksize=64, compress_statistics=nested, quant_type=kind)
                tensors[f"{name}.weight"] = packed
                for key, part in state.as_dict(packed=True).items():
                    tensors[f"{name}.weight.{key}"] = part.contiguous()
                state.dtype = torch.float32
                tensors[f"{name}.expected"] = bnb.dequantize_4bit(packed, state)
    w = torch.randn(48, 64, generator=generator).to(torch.float16)
    packed, scales, _ = bnb.int8_vectorwise_quant(w)
    tensors |= {"int8.weight": packed, "int8.SCB": scales, "int8.weight_format": torch.tensor(0, dtype=torch.uint8)}
    tensors["int8.expected"] = bnb.int8_vectorwise_dequant(packed, scales)
    save_file(tensors, Path(__file__).parent / "bitsandbytes.safetensors")


if __name__ == "__main__":
    main()
