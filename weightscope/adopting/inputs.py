"""Inputs that a tiny model runs on, made from its forward's parameters and its config."""

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

from weightscope.adopting.tiny_models import Size

PHRASE = 7  # tokens of a phrase, its end with it
FIRST_TOKEN = 60  # of a tiny model's texts; smaller ids are special tokens', which `own_size` runs
TEXT = ("text_config", "llm_config", "language_config", "thinker_config", "decoder", "text_encoder", "decoder_config")
SEEN = ("vision_config", "vision_encoder_config", "visual_config", "backbone_config", "image_encoder_config", "encoder")
MEL = (
    "input_size", "num_mel_bins", "feature_size", "input_feat_per_channel", "feature_projection_input_dim", "input_dim",
    "input_feat_size",
)  # fmt: skip
# Features of a frame where a config does not say how many: by model_type, their number.
UNSAID = {"gemma4_audio": 128, "granite_speech5_encoder": 64, "granite_speech5_ctc": 64}
CROSS = re.compile(r"cross|encoder_attn|EncDec", re.ASCII)  # in names of modules that attend to another sequence
# Height and width of an image where no square does: a line of text, whose height a backbone reduces to one.
STRIPS = dict.fromkeys(
    ("pp_ocrv5_mobile_rec", "pp_ocrv5_server_rec", "pp_ocrv6_small_rec", "pp_ocrv6_tiny_rec"), (48, 160)
)
HEARD = ("audio_config", "audio_encoder_config", "speech_config", "encoder_config")


def _get(config: Any, names: tuple[str, ...], default: Any, inner: tuple[str, ...] = ()) -> Any:
    """The first of these attributes that a config has, or else that a part of it has."""
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    for part in inner:
        section = getattr(config, part, None)
        if section is not None and not isinstance(section, str | int | dict):
            value_within = _get(section, names, None, inner)
            if value_within is not None:
                return value_within
    return default


class Inputs:
    """Inputs of one model.
    module: Has a config of transformers.
    start: Position of the first token.
    """

    def __init__(self, module: Any, size: Size, seed: int, start: int = 0) -> None:
        self.config, self.size, self.start = module.config, size, start
        self.generator = torch.Generator().manual_seed(1000 + seed)
        self.parameters = inspect.signature(module.forward).parameters
        self.crosses = any(CROSS.search(name) for name, _ in module.named_modules())
        # Ids that end a phrase, of a class in which tokens attend within phrases only.
        ends = [ids for name, ids in module.named_buffers() if name.endswith("special_tokens")]
        self.delimiters: list[int] = ends[0].tolist() if ends else []

    @property
    def vocabulary(self) -> int:
        return int(_get(self.config, ("vocab_size", "decoder_vocab_size"), self.size.vocabulary, TEXT))

    def ids(self, length: int) -> torch.Tensor:
        low = min(FIRST_TOKEN, self.vocabulary // 2)
        ids = torch.randint(low, self.vocabulary, (1, length), generator=self.generator)
        known = [each for each in self.delimiters if each < self.vocabulary]
        for place in range(PHRASE, length, PHRASE) if known else ():
            ids[0, place] = known[place // PHRASE % len(known)]
        return ids

    def noise(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def pixels(self) -> torch.Tensor:
        sizes = ("image_size", "img_size", "crop_size", "max_img_size")
        side = STRIPS.get(self.config.model_type) or _get(self.config, sizes, None, SEEN)
        if side is None:
            patch = _get(self.config, ("patch_size",), 16, SEEN)
            side = 4 * self.size.grid * (patch if isinstance(patch, int) else patch[-1])
        height, width = (side, side) if isinstance(side, int) else tuple(side)[-2:]
        channels = _get(self.config, ("num_channels", "in_channels", "in_chans"), 3, SEEN)
        return self.noise(1, channels if isinstance(channels, int) else 3, height, width)

    def frames(self) -> torch.Tensor:
        frames = int(_get(self.config, ("num_frames", "frames_per_clip"), 4, SEEN))
        image = self.pixels()
        return self.noise(1, frames, *image.shape[1:])

    def patches(self) -> torch.Tensor:
        """An image as the flat patches of Qwen VL's towers."""
        config = self.config
        patch = int(_get(config, ("patch_size",), 14, SEEN))
        per = int(_get(config, ("temporal_patch_size", "patch_temporal"), 1, SEEN)) * patch * patch
        return self.noise(4 * self.size.grid**2, int(_get(config, ("in_channels", "in_chans"), 3, SEEN)) * per)

    def features(self) -> torch.Tensor:
        mel = UNSAID.get(self.config.model_type) or int(_get(self.config, MEL, 16, HEARD))
        frames = 2 * int(_get(self.config, ("max_source_positions",), 2 * self.size.length, HEARD))
        frames = int(_get(self.config, ("max_length",), frames))
        window = 2 * int(_get(self.config, ("n_window",), 0, HEARD))
        if window and "input_features_mask" in self.parameters:  # which these models have where they take whole windows
            frames = -(-frames // window) * window
        return self.noise(1, mel, frames)

    def width(self) -> int:
        return int(_get(self.config, ("hidden_size", "d_model", "n_embd", "dim"), self.size.free, TEXT))

    def memory(self) -> torch.Tensor:
        width = _get(
            self.config, ("encoder_hidden_size", "cross_attention_hidden_size", "vision_hidden_size"), self.width()
        )
        return self.noise(1, self.size.length + 4, int(width))

    @property
    def positions(self) -> torch.Tensor:
        return torch.arange(self.start, self.start + self.size.length)[None]

    def attempts(self) -> Iterator[dict[str, Any]]:
        """Inputs to try, the plainest first; far positions are in the first where the model takes any."""
        has = self.parameters
        n, m = self.size.length, self.size.length + 4
        grid = torch.tensor([[1, 2 * self.size.grid, 2 * self.size.grid]])
        makers: dict[str, Callable[[], Any]] = {
            "input_ids": lambda: self.ids(n), "decoder_input_ids": lambda: self.ids(n),
            "pixel_values": self.pixels, "input_values": lambda: self.noise(1, 8000), "input_features": self.features,
            "encoder_hidden_states": self.memory, "query_embeds": lambda: self.noise(1, n, self.width()),
            "inputs_embeds": lambda: self.noise(1, n, self.width()),
            "hidden_states": lambda: self.noise(1, n, self.width()), "inputs": lambda: self.noise(1, n, self.width()),
            "latents": lambda: self.noise(1, self.width(), n), "noise_embeds": lambda: self.noise(1, n, self.width()),
            "context_hidden_states": lambda: self.noise(1, m, self.width() * len(self.config.target_layer_ids)),
            "audio_mel": lambda: self.features().transpose(1, 2),
            "audio_mel_mask": lambda: torch.zeros(1, self.features().shape[2], dtype=torch.bool),
        }  # fmt: skip
        if "input_ids" in has:
            text = {"input_ids": self.ids(n)}
            if "decoder_input_ids" in has:
                text = {"input_ids": self.ids(m), "decoder_input_ids": self.ids(n)}
            placed = text | {"position_ids": self.positions} if "position_ids" in has and self.start else text
            if "query_embeds" in has:
                queries = {"query_embeds": self.noise(1, n, self.width())}
                yield text | queries | {"encoder_hidden_states": self.memory()}
            if "encoder_hidden_states" in has and self.crosses:  # first: only with it do all layers attend
                yield placed | {"encoder_hidden_states": self.memory()}
            if self.config.model_type in ("dia", "dia_decoder"):  # a token for each channel of sound
                channels = int(_get(self.config, ("num_channels",), 0, ("decoder_config",)))
                name = "decoder_input_ids" if "decoder_input_ids" in has else "input_ids"
                memory = {"encoder_hidden_states": self.memory()} if name == "input_ids" else {}
                yield text | {name: self.ids(n * channels).reshape(1, n, channels)} | memory
            if placed is not text:
                yield placed
            yield text
            if "pixel_values" in has:
                yield text | {"input_ids": self.ids(n + 3), "pixel_values": self.pixels()}
            if "image_attention_mask" in has:
                image, mask = self.pixels()[:, None], torch.ones(1, n, 1)
                yield text | {"pixel_values": image, "image_attention_mask": mask}
            if "visual_feats" in has:
                seen = int(_get(self.config, ("visual_feat_dim",), 16))
                yield text | {"visual_feats": self.noise(1, m, seen), "visual_pos": self.noise(1, m, 4)}
            if "bbox" in has:
                yield text | {"bbox": torch.randint(0, 60, (1, n, 4), generator=self.generator).sort(-1).values}
            if "encoder_hidden_states" in has and not self.crosses:
                yield text | {"encoder_hidden_states": self.memory()}
            if self.config.model_type == "voxtral_realtime_text":  # it takes the time's embedding by name alone
                yield text | {"t_cond": self.noise(1, self.width())}
            if "input_features" in has:
                yield text | {"input_features": self.features()}
            if "input_values" in has:
                yield text | {"input_values": self.noise(1, 8000)}
        decoder = {"decoder_input_ids": self.ids(n + 3)} if "decoder_input_ids" in has else {}  # not as long as images
        if "grid_thw" in has or "image_grid_thw" in has:
            name = "grid_thw" if "grid_thw" in has else "image_grid_thw"
            first = next(iter(has))
            of_side = {"merge_sizes": torch.tensor([1])} if "merge_sizes" in has else {}
            yield {first: self.patches(), name: grid} | of_side
            patch = int(_get(self.config, ("patch_size",), 14, SEEN))
            images = self.patches().reshape(4 * self.size.grid**2, -1, patch, patch)
            yield {first: images, name: grid}
            yield {first: images[None], name: grid}
            merge = int(_get(self.config, ("spatial_merge_size",), 1, SEEN))
            tiles = self.noise(self.size.grid**2, merge * patch, merge * patch, 3)  # one per token of the text
            yield {first: tiles, name: torch.tensor([[1, self.size.grid, self.size.grid]])}
        if "spatial_shapes" in has or "pixel_position_ids" in has:
            side = self.size.grid
            places = torch.cartesian_prod(torch.arange(side), torch.arange(side)).flip(-1)[None]
            given = {
                "spatial_shapes": torch.tensor([[side, side]]), "pixel_position_ids": places,
                "pixel_attention_mask": torch.ones(1, side**2, dtype=torch.long),
            }  # fmt: skip
            given = {name: value for name, value in given.items() if name in has}
            yield {"pixel_values": self.patches()[None, : side**2]} | given
        if "target_sizes" in has:
            patch, side = int(_get(self.config, ("patch_size",), 14, SEEN)), 2 * self.size.grid
            row = self.noise(1, 3, patch, side * side * patch)  # an image's patches side by side
            yield {"pixel_values": row, "target_sizes": torch.tensor([[side, side]], dtype=torch.int32)}
        if "prompt_pixel_values" in has:
            upper, lower = self.pixels().chunk(2, dim=2)  # the prompt is the upper half of what is seen
            yield {"pixel_values": lower, "prompt_pixel_values": upper, "prompt_masks": torch.ones_like(lower)}
        if "aspect_ratio_ids" in has:
            tiles = int(_get(self.config, ("max_num_tiles",), 4, SEEN))
            image = self.pixels()[:, None, None].repeat(1, 1, tiles, 1, 1, 1)
            image = image + 0.1 * self.noise(*image.shape)
            given = {
                "aspect_ratio_ids": torch.ones(1, 1, dtype=torch.long),
                "aspect_ratio_mask": torch.ones(1, 1, tiles),
            }
            yield {"pixel_values": image} | given
        if "flattened_patches" in has:  # each after its row and column, which count from one
            patch, side = int(_get(self.config, ("patch_size",), 16, SEEN)), self.size.grid
            places = torch.cartesian_prod(torch.arange(1, side + 1), torch.arange(1, side + 1)).float()
            wide = int(_get(self.config, ("patch_embed_hidden_size",), 3 * patch * patch, SEEN))
            flat = torch.cat([places, self.noise(side**2, wide)], dim=1)[None]
            given = {"flattened_patches": flat, "attention_mask": torch.ones(1, side**2)}
            yield given | decoder
            yield {"flattened_patches": flat} | decoder
        if "pixel_values_videos" in has:
            yield {"pixel_values_videos": self.frames()}
        if "pixel_values" in has:
            yield {"pixel_values": self.pixels()} | decoder
            yield {"pixel_values": torch.stack([self.pixels(), self.pixels()], 1)} | decoder
            yield {"pixel_values": self.frames()} | decoder
        if "input_features" in has:
            features = self.features()
            mask = torch.ones(1, features.shape[2], dtype=torch.long)
            if "input_features_mask" in has:
                yield {"input_features": features, "input_features_mask": mask}
                yield {"input_features": features.transpose(1, 2).contiguous(), "input_features_mask": mask}
            yield {"input_features": features} | decoder
            yield {"input_features": features.transpose(1, 2).contiguous()} | decoder
            yield {"input_features": features[0], "feature_lens": torch.tensor([features.shape[2]])} | decoder
        if "input_values" in has:
            yield {"input_values": self.noise(1, 8000)} | decoder
            yield {"input_values": self.noise(1, 1, 8000)} | decoder
            yield {"input_values": self.features().transpose(1, 2).contiguous()} | decoder
        if "query_embeds" in has:
            yield {"query_embeds": self.noise(1, n, self.width()), "encoder_hidden_states": self.memory()}
        if "inputs_embeds" in has:
            yield {"inputs_embeds": self.noise(1, n, self.width())}
        if "past_values" in has:
            past = int(_get(self.config, ("context_length", "prediction_length"), 8))
            lags = max(getattr(self.config, "lags_sequence", None) or [0])
            shape, later = (1, past + lags), (1, int(_get(self.config, ("prediction_length",), 4)))
            features = int(getattr(self.config, "num_time_features", 0) or 0)
            yield {
                "past_values": self.noise(*shape), "past_observed_mask": torch.ones(shape),
                "past_time_features": self.noise(*shape, features), "future_values": self.noise(*later),
                "future_time_features": self.noise(*later, features),
            }  # fmt: skip
            if "freq" in has:
                yield {
                    "past_values": self.noise(1, past), "past_values_padding": torch.zeros(1, past, dtype=torch.long),
                    "freq": torch.zeros(1, 1, dtype=torch.long),
                }  # fmt: skip
            yield {"past_values": self.noise(1, past, int(getattr(self.config, "num_input_channels", 1)))}
            yield {"past_values": self.noise(1, past)}
        if "hidden_states" in has:
            states = {"hidden_states": self.noise(1, n, self.width())}
            if "encoder_hidden_states" in has:
                yield states | {"encoder_hidden_states": self.memory()}
            yield states
        needed = [
            name
            for name, parameter in has.items()
            if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        ]
        if needed and all(name in makers for name in needed):
            yield {name: makers[name]() for name in needed}
