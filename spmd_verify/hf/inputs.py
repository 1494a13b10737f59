"""Inputs for a shrunk Hugging Face model: tokens, images or audio, with labels.

All tensors are global and drawn from torch's default generator.
"""

import math
from collections.abc import Container
from typing import Any, Final

import torch
from torch import Tensor

from spmd_verify.hf.shrink import FIRST_PLAIN_TOKEN

NUM_TOKENS: Final = 16
IGNORED: Final = -100
# A tenth of the tokens is padded, spread from none in the first row to a fifth in the last.
_LARGEST_PADDED_SHARE: Final = 0.2
_IMAGE_SIZE: Final = 32
_NUM_AUDIO_FRAMES: Final = 32
_NUM_TRANSCRIPT_TOKENS: Final = 4
_TOKEN_LABELS: Final = ("causal", "mlm", "seq2seq", "speech2seq")


def make_inputs(
    head: str,
    model_class: Any,
    config: Any,
    batch: int,
    names: Container[str],
    *,
    padding: bool = True,
) -> dict[str, Any]:
    """Return the keyword arguments of one forward with its loss.

    Args:
        head: A key of `heads` in the data file.
        model_class: The class, for its main input's name.
        config: The shrunk configuration.
        batch: Samples.
        names: Parameters of forward; optional inputs that it does not take are left out.
        padding: Whether rows of tokens are padded, unequally.
    """
    share = _LARGEST_PADDED_SHARE if padding else 0.0
    main = model_class.main_input_name
    if main == "pixel_values":
        inputs = _image_inputs(config, batch)
    elif main in ("input_features", "input_values"):
        inputs = _audio_inputs(main, config, batch)
    else:
        inputs = _token_inputs(config, batch, share)
    if head != "detect":
        inputs["labels"] = _labels(head, inputs, config, batch, share)
    return {name: value for name, value in inputs.items() if name in names}


def _token_inputs(config: Any, batch: int, share: float) -> dict[str, Tensor]:
    """Return `input_ids` and `attention_mask`, [batch, 16], rows padded unequally."""
    text = config.get_text_config()
    tokens = torch.randint(FIRST_PLAIN_TOKEN, _vocabulary(text), (batch, NUM_TOKENS))
    mask = _padding_mask(batch, share)
    padding = getattr(text, "pad_token_id", None)
    tokens[mask == 0] = padding if isinstance(padding, int) and padding >= 0 else 0
    return {"input_ids": tokens, "attention_mask": mask}


def _padding_mask(batch: int, largest: float) -> Tensor:
    """Return 1 at tokens and 0 at padding, [batch, 16]; later rows are padded more."""
    share = torch.arange(batch) / max(batch - 1, 1)
    padded = (share * largest * NUM_TOKENS).round().long()
    return (torch.arange(NUM_TOKENS)[None, :] < NUM_TOKENS - padded[:, None]).long()


def _image_inputs(config: Any, batch: int) -> dict[str, Tensor]:
    """Return `pixel_values`, [batch, channels, height, width], as the configuration asks."""
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", None) or _IMAGE_SIZE
    height, width = (size, size) if isinstance(size, int) else tuple(size)
    channels = getattr(vision, "num_channels", None) or 3
    return {"pixel_values": torch.randn(batch, channels, height, width)}


def _audio_inputs(name: str, config: Any, batch: int) -> dict[str, Tensor]:
    """Return a waveform [batch, samples] or a spectrogram, as the configuration asks."""
    mels = getattr(config, "num_mel_bins", None)
    frames = getattr(config, "max_source_positions", None)
    if name == "input_values":
        length = getattr(config, "max_length", None)
        shape = (batch, length, mels) if length and mels else (batch, _waveform_samples(config))
    elif mels and frames:
        shape = (batch, mels, 2 * frames)
    else:
        per_channel = getattr(config, "input_feat_per_channel", None)
        width = per_channel or mels or getattr(config, "feature_projection_input_dim", 80)
        shape = (batch, _NUM_AUDIO_FRAMES, width)
    return {name: torch.randn(*shape)}


def _waveform_samples(config: Any) -> int:
    """Return how many samples give about `_NUM_AUDIO_FRAMES` frames after the strides."""
    return _NUM_AUDIO_FRAMES * math.prod(getattr(config, "conv_stride", [10]))


def _labels(head: str, inputs: dict[str, Tensor], config: Any, batch: int, share: float) -> Tensor:
    """Return labels: the inputs for `causal`, random classes else, -100 at padding."""
    vocabulary = _vocabulary(config.get_text_config()) if head in (*_TOKEN_LABELS, "ctc") else 0
    if head in _TOKEN_LABELS:
        mask = inputs.get("attention_mask", _padding_mask(batch, share))
        drawn = torch.randint(FIRST_PLAIN_TOKEN, vocabulary, mask.shape)
        labels = inputs["input_ids"] if head == "causal" and "input_ids" in inputs else drawn
        return labels.masked_fill(mask == 0, IGNORED)
    if head == "ctc":
        return torch.randint(FIRST_PLAIN_TOKEN, vocabulary, (batch, _NUM_TRANSCRIPT_TOKENS))
    classes = config.num_labels
    if head == "semseg":
        return torch.randint(0, classes, (batch, *inputs["pixel_values"].shape[2:]))
    return torch.randint(0, classes, (batch,))


def _vocabulary(config: Any) -> int:
    """Return the size of the vocabulary."""
    return int(config.vocab_size)
