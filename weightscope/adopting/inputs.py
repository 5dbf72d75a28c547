"""Inputs that a tiny model runs on: `ATTEMPTS`, by the parameters of its forward pass."""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from weightscope.adopting.tiny_models import Size

PHRASE = 7  # tokens of a phrase, its end with it
FIRST_TOKEN = 60  # least id of tiny models' texts; smaller ones are special, for `full_size`
TEXT = (
    "text_config",
    "llm_config",
    "language_config",
    "thinker_config",
    "decoder",
    "text_encoder",
    "decoder_config",
)
SEEN = (
    "vision_config",
    "vision_encoder_config",
    "visual_config",
    "backbone_config",
    "image_encoder_config",
    "encoder",
)
MEL = (
    "input_size",
    "num_mel_bins",
    "feature_size",
    "input_feat_per_channel",
    "feature_projection_input_dim",
    "input_dim",
    "input_feat_size",
)
# Numbers of features of a frame, by model_type, where a config has none.
UNSAID = {"gemma4_audio": 128, "granite_speech5_encoder": 64, "granite_speech5_ctc": 64}
CROSS = re.compile(r"cross|encoder_attn|EncDec", re.ASCII)  # words in names of cross-attention
# Height and width of images of a line of text, whose height a backbone reduces to one.
STRIPS = dict.fromkeys(
    ("pp_ocrv5_mobile_rec", "pp_ocrv5_server_rec", "pp_ocrv6_small_rec", "pp_ocrv6_tiny_rec"),
    (48, 160),
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
    """Inputs of one model, a module with a config of transformers, from position `start` on."""

    samples = 8000  # samples of a wave

    def __init__(self, module: Any, size: Size, seed: int, start: int = 0) -> None:
        self.config, self.size, self.start = module.config, size, start
        self.generator = torch.Generator().manual_seed(1000 + seed)
        self.parameters = inspect.signature(module.forward).parameters
        crosses = any(CROSS.search(name) for name, _ in module.named_modules())
        self.facts = {*self.parameters, f"type:{module.config.model_type}"}
        self.facts |= {"crosses" if crosses else "stays", "far" if start else "near"}
        self.lacked = OPTIONAL - self.parameters.keys()
        ends = [ids for name, ids in module.named_buffers() if name.endswith("special_tokens")]
        # ids that end a phrase, in classes whose tokens attend within phrases only
        self.delimiters: list[int] = ends[0].tolist() if ends else []

    def attempts(self) -> Iterator[dict[str, Any]]:
        """Inputs to try, the plainest first; far positions first of all, if the model takes any."""
        for needs, makes in ATTEMPTS:
            if any(self.facts.isdisjoint(need.split("|")) for need in needs.split()):
                continue
            named = dict(makes)
            if FIRST in makes:
                named = {next(iter(self.parameters)): named.pop(FIRST)} | named
            made = {name: make(self) for name, make in named.items() if name not in self.lacked}
            yield {name: value for name, value in made.items() if value is not None}
        parameters = [
            (name, parameter)
            for name, parameter in self.parameters.items()
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        ]
        needed = [name for name, parameter in parameters if parameter.default is parameter.empty]
        if needed and all(name in REQUIRED for name in needed):
            yield {name: REQUIRED[name](self) for name in needed}

    def number(self, default: int, *names: str, parts: tuple[str, ...] = ()) -> int:
        """The first of these numbers that the config has, or else that a part of it has."""
        return int(_get(self.config, names, default, parts))

    @property
    def vocabulary(self) -> int:
        return self.number(self.size.vocabulary, "vocab_size", "decoder_vocab_size", parts=TEXT)

    @property
    def width(self) -> int:
        return self.number(self.size.free, "hidden_size", "d_model", "n_embd", "dim", parts=TEXT)

    @property
    def patch(self) -> int:
        return self.number(14, "patch_size", parts=SEEN)

    @property
    def positions(self) -> torch.Tensor:
        return torch.arange(self.start, self.start + self.size.length)[None]

    def ids(self, length: int) -> torch.Tensor:
        low = min(FIRST_TOKEN, self.vocabulary // 2)
        ids = torch.randint(low, self.vocabulary, (1, length), generator=self.generator)
        known = [each for each in self.delimiters if each < self.vocabulary]
        for place in range(PHRASE, length, PHRASE) if known else ():
            ids[0, place] = known[place // PHRASE % len(known)]
        return ids

    def text(self) -> torch.Tensor:
        return self.ids(self.size.length + (4 if "decoder_input_ids" in self.parameters else 0))

    def channels(self) -> torch.Tensor:
        """A token for each channel of sound."""
        n, channels = self.size.length, self.number(0, "num_channels", parts=("decoder_config",))
        return self.ids(n * channels).reshape(1, n, channels)

    def noise(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def stream(self, more: int = 0, width: int = 0) -> torch.Tensor:
        return self.noise(1, self.size.length + more, width or self.width)

    def memory(self) -> torch.Tensor:
        names = ("encoder_hidden_size", "cross_attention_hidden_size", "vision_hidden_size")
        return self.stream(4, self.number(self.width, *names))

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
        frames = self.number(4, "num_frames", "frames_per_clip", parts=SEEN)
        return self.noise(1, frames, *self.pixels().shape[1:])

    def halves(self) -> tuple[torch.Tensor, ...]:
        return self.pixels().chunk(2, dim=2)

    def tiles(self) -> torch.Tensor:
        tiles = self.number(4, "max_num_tiles", parts=SEEN)
        image = self.pixels()[:, None, None].repeat(1, 1, tiles, 1, 1, 1)
        return image + 0.1 * self.noise(*image.shape)

    def patches(self) -> torch.Tensor:
        """An image as the flat patches of Qwen VL's towers."""
        pixels = self.number(1, "temporal_patch_size", "patch_temporal", parts=SEEN) * self.patch**2
        channels = self.number(3, "in_channels", "in_chans", parts=SEEN)
        return self.noise(4 * self.size.grid**2, channels * pixels)

    def square_patches(self) -> torch.Tensor:
        return self.patches().reshape(4 * self.size.grid**2, -1, self.patch, self.patch)

    def merged_patches(self) -> torch.Tensor:
        """Patches of pixels, one per token of the text."""
        side = self.patch * self.number(1, "spatial_merge_size", parts=SEEN)
        return self.noise(self.size.grid**2, side, side, 3)

    def grid(self, patches: int) -> torch.Tensor:
        """One image of as many patches, times a tiny model's, along each side."""
        return torch.tensor([[1, patches * self.size.grid, patches * self.size.grid]])

    def places(self) -> torch.Tensor:
        """(row, column) of each patch of a square image."""
        numbers = torch.arange(self.size.grid)
        return torch.cartesian_prod(numbers, numbers)

    def numbered_patches(self) -> torch.Tensor:
        """Patches after their row and column, which count from one."""
        patch, places = self.number(16, "patch_size", parts=SEEN), 1.0 + self.places()
        width = self.number(3 * patch * patch, "patch_embed_hidden_size", parts=SEEN)
        return torch.cat([places, self.noise(len(places), width)], dim=1)[None]

    def features(self) -> torch.Tensor:
        mel = UNSAID.get(self.config.model_type) or self.number(16, *MEL, parts=HEARD)
        frames = 2 * self.number(2 * self.size.length, "max_source_positions", parts=HEARD)
        frames = self.number(frames, "max_length")
        window = 2 * self.number(0, "n_window", parts=HEARD)
        takes_whole_windows = "input_features_mask" in self.parameters
        if window and takes_whole_windows:
            frames = -(-frames // window) * window
        return self.noise(1, mel, frames)

    def features_by_time(self) -> torch.Tensor:
        return self.features().transpose(1, 2).contiguous()

    def every_frame(self) -> torch.Tensor:
        return torch.ones(1, self.features().shape[2], dtype=torch.long)

    def boxes(self) -> torch.Tensor:
        corners = torch.randint(0, 60, (1, self.size.length, 4), generator=self.generator)
        return corners.sort(-1).values

    def series(
        self, later: bool = False, lagged: bool = False, more: tuple[int, ...] = ()
    ) -> torch.Tensor:
        """Numbers in time, past or later, each with some more."""
        past = self.number(8, "context_length", "prediction_length")
        past += max(getattr(self.config, "lags_sequence", None) or [0]) if lagged else 0
        return self.noise(1, self.number(4, "prediction_length") if later else past, *more)

    def times(self, later: bool = False) -> torch.Tensor:
        """The known features of each of these points in time."""
        return self.series(later, lagged=True, more=(self.number(0, "num_time_features"),))


Maker = Callable[[Inputs], torch.Tensor | None]
FIRST = "the first parameter"
OPTIONAL = {  # inputs that are left out where a forward pass lacks them
    "decoder_input_ids", "position_ids", "grid_thw", "image_grid_thw", "merge_sizes",
    "spatial_shapes", "pixel_position_ids", "pixel_attention_mask",
}  # fmt: skip
# Decoder texts of another length than images.
DECODER: dict[str, Maker] = {"decoder_input_ids": lambda i: i.ids(i.size.length + 3)}
GRID: dict[str, Maker] = dict.fromkeys(("grid_thw", "image_grid_thw"), lambda i: i.grid(2))
SOUND: dict[str, Maker] = {"input_features": Inputs.features}
WAVE: dict[str, Maker] = {"input_values": lambda i: i.noise(1, i.samples)}
MEMORY: dict[str, Maker] = {"encoder_hidden_states": Inputs.memory}
FAR: dict[str, Maker] = {"position_ids": lambda i: i.positions if i.start else None}


def _text(**more: Maker) -> dict[str, Maker]:
    return {"input_ids": Inputs.text, "decoder_input_ids": lambda i: i.ids(i.size.length), **more}


def _ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.long)


# Attempts in their order: parameters that a forward pass must have ("a|b": either), and makers of
# inputs. Other words tell a model that "crosses" to another sequence from one that "stays" in its
# own, a first position "far" from 0, and a model_type.
ATTEMPTS: tuple[tuple[str, Mapping[str, Maker]], ...] = (
    ("input_ids query_embeds", _text(query_embeds=Inputs.stream, **MEMORY)),
    # early: only with it do all layers attend
    ("input_ids encoder_hidden_states crosses", _text(**FAR, **MEMORY)),
    ("input_ids type:dia", _text(decoder_input_ids=Inputs.channels)),
    ("input_ids type:dia_decoder", _text(input_ids=Inputs.channels, **MEMORY)),
    ("input_ids position_ids far", _text(**FAR)),
    ("input_ids", _text()),
    (
        "input_ids pixel_values",
        _text(input_ids=lambda i: i.ids(i.size.length + 3), pixel_values=Inputs.pixels),
    ),
    (
        "input_ids image_attention_mask",
        _text(
            pixel_values=lambda i: i.pixels()[:, None],
            image_attention_mask=lambda i: torch.ones(1, i.size.length, 1),
        ),
    ),
    (
        "input_ids visual_feats",
        _text(
            visual_feats=lambda i: i.stream(4, i.number(16, "visual_feat_dim")),
            visual_pos=lambda i: i.stream(4, 4),
        ),
    ),
    ("input_ids bbox", _text(bbox=Inputs.boxes)),
    ("input_ids encoder_hidden_states stays", _text(**MEMORY)),
    ("input_ids type:voxtral_realtime_text", _text(t_cond=lambda i: i.noise(1, i.width))),
    ("input_ids input_features", _text(**SOUND)),
    ("input_ids input_values", _text(**WAVE)),
    ("grid_thw|image_grid_thw", {FIRST: Inputs.patches, **GRID, "merge_sizes": lambda i: _ones(1)}),
    ("grid_thw|image_grid_thw", {FIRST: Inputs.square_patches, **GRID}),
    ("grid_thw|image_grid_thw", {FIRST: lambda i: i.square_patches()[None], **GRID}),
    (
        "grid_thw|image_grid_thw",
        {FIRST: Inputs.merged_patches, **dict.fromkeys(GRID, lambda i: i.grid(1))},
    ),
    (
        "spatial_shapes|pixel_position_ids",
        {
            "pixel_values": lambda i: i.patches()[None, : i.size.grid**2],
            "spatial_shapes": lambda i: i.grid(1)[:, 1:],
            "pixel_position_ids": lambda i: i.places().flip(-1)[None],
            "pixel_attention_mask": lambda i: _ones(1, i.size.grid**2),
        },
    ),
    (
        "target_sizes",
        {
            # patches side by side
            "pixel_values": lambda i: i.noise(1, 3, i.patch, 4 * i.size.grid**2 * i.patch),
            "target_sizes": lambda i: i.grid(2)[:, 1:].int(),
        },
    ),
    (
        "prompt_pixel_values",
        {  # the prompt is the upper half of what is seen
            "pixel_values": lambda i: i.halves()[1],
            "prompt_pixel_values": lambda i: i.halves()[0],
            "prompt_masks": lambda i: torch.ones_like(i.halves()[1]),
        },
    ),
    (
        "aspect_ratio_ids",
        {
            "pixel_values": Inputs.tiles,
            "aspect_ratio_ids": lambda i: _ones(1, 1),
            "aspect_ratio_mask": lambda i: torch.ones(
                1, 1, i.number(4, "max_num_tiles", parts=SEEN)
            ),
        },
    ),
    (
        "flattened_patches",
        {
            "flattened_patches": Inputs.numbered_patches,
            "attention_mask": lambda i: torch.ones(1, i.size.grid**2),
            **DECODER,
        },
    ),
    ("flattened_patches", {"flattened_patches": Inputs.numbered_patches, **DECODER}),
    ("pixel_values_videos", {"pixel_values_videos": Inputs.frames}),
    ("pixel_values", {"pixel_values": Inputs.pixels, **DECODER}),
    (
        "pixel_values",
        {"pixel_values": lambda i: torch.stack([i.pixels(), i.pixels()], 1), **DECODER},
    ),
    ("pixel_values", {"pixel_values": Inputs.frames, **DECODER}),
    ("input_features input_features_mask", {**SOUND, "input_features_mask": Inputs.every_frame}),
    (
        "input_features input_features_mask",
        {"input_features": Inputs.features_by_time, "input_features_mask": Inputs.every_frame},
    ),
    ("input_features", {**SOUND, **DECODER}),
    ("input_features", {"input_features": Inputs.features_by_time, **DECODER}),
    (
        "input_features",
        {
            "input_features": lambda i: i.features()[0],
            "feature_lens": lambda i: i.every_frame().sum(1),
            **DECODER,
        },
    ),
    ("input_values", {**WAVE, **DECODER}),
    ("input_values", {"input_values": lambda i: i.noise(1, 1, i.samples), **DECODER}),
    ("input_values", {"input_values": Inputs.features_by_time, **DECODER}),
    ("query_embeds", {"query_embeds": Inputs.stream, **MEMORY}),
    ("inputs_embeds", {"inputs_embeds": Inputs.stream}),
    (
        "past_values",
        {
            "past_values": lambda i: i.series(lagged=True),
            "past_observed_mask": lambda i: 1 + 0 * i.series(lagged=True),
            "past_time_features": Inputs.times,
            "future_values": lambda i: i.series(later=True),
            "future_time_features": lambda i: i.times(later=True),
        },
    ),
    (
        "past_values freq",
        {
            "past_values": Inputs.series,
            "past_values_padding": lambda i: 0 * i.series().long(),
            "freq": lambda i: 0 * _ones(1, 1),
        },
    ),
    ("past_values", {"past_values": lambda i: i.series(more=(i.number(1, "num_input_channels"),))}),
    ("past_values", {"past_values": Inputs.series}),
    ("hidden_states encoder_hidden_states", {"hidden_states": Inputs.stream, **MEMORY}),
    ("hidden_states", {"hidden_states": Inputs.stream}),
)
# Makers of the parameters that a model needs, for one that takes none of the attempts.
REQUIRED: Mapping[str, Maker] = {
    **SOUND,
    **WAVE,
    **MEMORY,
    "pixel_values": Inputs.pixels,
    **dict.fromkeys(("input_ids", "decoder_input_ids"), lambda i: i.ids(i.size.length)),
    **dict.fromkeys(
        ("query_embeds", "inputs_embeds", "hidden_states", "inputs", "noise_embeds"), Inputs.stream
    ),
    "latents": lambda i: i.noise(1, i.width, i.size.length),
    "context_hidden_states": lambda i: i.stream(4, i.width * len(i.config.target_layer_ids)),
    "audio_mel": lambda i: i.features().transpose(1, 2),
    "audio_mel_mask": lambda i: i.every_frame() == 0,
}
