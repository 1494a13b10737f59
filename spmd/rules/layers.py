"""Convolutions, normalisations, pools and resampling: the batch is free, sums over it partial."""

from __future__ import annotations

from typing import Any

import torch

from spmd.rules.base import Call, DimRule, Label, Rule, rule

aten = torch.ops.aten


@rule(aten.convolution.default)
def _convolution(call: Call) -> Rule:
    """The batch is free; without groups so are the output channels, and input channels add up."""
    x = call.operands[0]
    spatial: list[Label | None] = [None] * (x.dim() - 2)
    batch, channel, out = "batch", "in", "out"
    if call.argument("groups") != 1:
        channel = out = None  # type: ignore[assignment]
    weight = [channel, out] if call.argument("transposed") else [out, channel]
    inputs: list[Any] = [[batch, channel, *spatial], [*weight, *spatial]]
    if len(call.operands) == 3:
        # The bias would be added once per rank.
        inputs.append([out])
        inputs[0][1] = inputs[1][weight.index(channel)] = None
        return DimRule(inputs, [[batch, out, *spatial]])
    either = (frozenset((0,)), frozenset((1,)))
    return DimRule(inputs, [[batch, out, *spatial]], {"in": "sum"}, either)


@rule(aten.convolution_backward.default)
def _convolution_backward(call: Call) -> Rule:
    """The batch is free and adds up in the gradients of weight and bias.

    Without groups, output channels are free and add up in the image's gradient; input
    channels are free where no bias gradient is asked for, which does not have them.
    """
    spatial = [None] * (call.operands[1].dim() - 2)
    channel, out = ("in", "out") if call.argument("groups") == 1 else (None, None)
    if call.outputs[2] is not None:
        channel = None
    weight = [channel, out] if call.argument("transposed") else [out, channel]
    grad, image = ["batch", out, *spatial], ["batch", channel, *spatial]
    kernel = [*weight, *spatial]
    outputs = [image, kernel, [out]]
    kept = [
        labels if o is not None else ["batch", "in", "out"]
        for labels, o in zip(outputs, call.outputs, strict=True)
    ]
    return DimRule([grad, image, kernel], kept, {"batch": "sum", "out": "sum"})


def _leading(ndim: int, inner: int) -> list[Label | None]:
    return [*range(ndim - inner), *([None] * inner)]


@rule(aten.native_layer_norm.default, aten._fused_rms_norm.default)
def _layer_norm(call: Call) -> Rule:
    x = call.operands[0]
    inner = len(call.argument("normalized_shape"))
    lead = _leading(x.dim(), inner)
    affine = [[None] * w.dim() for w in call.operands[1:]]
    statistic = [[*lead[: x.dim() - inner], *([None] * inner)] for _ in call.outputs[1:]]
    for i, out in enumerate(call.outputs[1:]):
        if out is not None:
            statistic[i] = _leading(x.dim(), inner)[: out.dim()]
    return DimRule([lead, *affine], [lead, *statistic])


@rule(aten.native_layer_norm_backward.default, aten._fused_rms_norm_backward.default)
def _layer_norm_backward(call: Call) -> Rule:
    x = call.operands[1]
    inner = len(call.argument("normalized_shape"))
    lead = _leading(x.dim(), inner)
    inputs: list[Any] = [lead, lead]
    statistics = 2 if call.target == aten.native_layer_norm_backward.default else 1
    for i, operand in enumerate(call.operands[2:]):
        is_statistic = i < statistics
        inputs.append(lead[: operand.dim()] if is_statistic else [None] * operand.dim())
    free = [label for label in lead if label is not None]
    outputs = _masked(call, [lead, [None] * inner, [None] * inner])
    return DimRule(inputs, outputs, dict.fromkeys(free, "sum"))


def _masked(call: Call, outputs: list[Any]) -> list[Any]:
    """Outputs a mask left out place nothing: they take every label."""
    return [
        labels if out is not None else outputs[0]
        for labels, out in zip(outputs, call.outputs, strict=False)
    ]


@rule(aten.native_group_norm.default)
def _group_norm(call: Call) -> Rule:
    x = call.operands[0]
    image = ["batch", *([None] * (x.dim() - 1))]
    affine = [[None]] * (len(call.operands) - 1)

    def local(emitter: Any, call: Call, args: list[Any], kwargs: Any, layouts: Any) -> None:
        args[3] = emitter.sizes(tuple(x.shape), emitter.inputs[0])[0]

    outputs: list[Any] = [image, ["batch", None], ["batch", None]]
    return DimRule([image, *affine], outputs, local_args=local)


@rule(aten.native_group_norm_backward.default)
def _group_norm_backward(call: Call) -> Rule:
    image = ["batch", *([None] * (call.operands[0].dim() - 1))]
    statistic = ["batch", None]
    inputs: list[Any] = [image, image, statistic, statistic]
    inputs += [[None]] * (len(call.operands) - 4)

    def local(emitter: Any, call: Call, args: list[Any], kwargs: Any, layouts: Any) -> None:
        # The batch size is that of the gradient, an input: outputs may be masked out.
        args[5] = emitter.sizes(tuple(call.operands[0].shape), emitter.inputs[0])[0]

    return DimRule(inputs, _masked(call, [image, [None], [None]]), {"batch": "sum"},
                   local_args=local)  # fmt: skip


_SPATIAL = {
    1: (aten.avg_pool1d, aten.upsample_nearest1d, aten.upsample_linear1d,
        aten._upsample_nearest_exact1d, aten.reflection_pad1d, aten.replication_pad1d,
        aten.max_pool1d_with_indices, aten.adaptive_avg_pool1d),
    2: (aten.avg_pool2d, aten.max_pool2d_with_indices, aten._adaptive_avg_pool2d, aten.max_unpool2d,
        aten.adaptive_max_pool2d, aten.upsample_nearest2d, aten.upsample_bilinear2d,
        aten.upsample_bicubic2d, aten._upsample_nearest_exact2d, aten._upsample_bilinear2d_aa,
        aten._upsample_bicubic2d_aa, aten.reflection_pad2d, aten.replication_pad2d,
        aten.avg_pool2d_backward, aten.max_pool2d_with_indices_backward,
        aten._adaptive_avg_pool2d_backward, aten.adaptive_max_pool2d_backward,
        aten.reflection_pad2d_backward, aten.replication_pad2d_backward),
    3: (aten.avg_pool3d, aten.max_pool3d_with_indices, aten._adaptive_avg_pool3d, aten.max_unpool3d,
        aten.adaptive_max_pool3d, aten.upsample_nearest3d, aten.upsample_trilinear3d,
        aten._upsample_nearest_exact3d, aten.reflection_pad3d, aten.replication_pad3d,
        aten.avg_pool3d_backward, aten.max_pool3d_with_indices_backward,
        aten._adaptive_avg_pool3d_backward, aten.adaptive_max_pool3d_backward,
        aten.reflection_pad3d_backward, aten.replication_pad3d_backward),
}  # fmt: skip
_SPATIAL[1] += (aten.reflection_pad1d_backward, aten.replication_pad1d_backward)


def _spatial(num_spatial: int) -> Any:
    def make(call: Call) -> Rule:
        x = call.operands[0]
        labels = _leading(x.dim(), num_spatial)
        return DimRule([labels] * len(call.operands), [labels] * len(call.outputs))

    return make


for _count, _packets in _SPATIAL.items():
    rule(*_packets)(_spatial(_count))


@rule(
    aten.upsample_nearest1d_backward, aten.upsample_linear1d_backward,
    aten.upsample_nearest2d_backward, aten.upsample_bilinear2d_backward,
    aten.upsample_bicubic2d_backward, aten.upsample_nearest3d_backward,
    aten.upsample_trilinear3d_backward, aten._upsample_nearest_exact1d_backward,
    aten._upsample_nearest_exact2d_backward, aten._upsample_nearest_exact3d_backward,
    aten._upsample_bilinear2d_aa_backward, aten._upsample_bicubic2d_aa_backward,
)  # fmt: skip
def _resample_backward(call: Call) -> Rule:
    out = call.outputs[0]
    assert out is not None
    labels = _leading(out.dim(), out.dim() - 2)

    def local(emitter: Any, call: Call, args: list[Any], kwargs: Any, layouts: Any) -> None:
        args[2] = emitter.sizes(tuple(out.shape), layouts[0])

    return DimRule([labels], [labels], linear=(frozenset((0,)),), local_args=local)


@rule(
    aten.grid_sampler_2d, aten.grid_sampler_3d, aten.grid_sampler_2d_backward,
    aten.grid_sampler_3d_backward, aten.im2col, aten.col2im, aten._fft_r2c, aten._fft_c2r,
    aten._fft_c2c, aten.channel_shuffle,
)  # fmt: skip
def _batch_first(call: Call) -> Rule | None:
    if call.target._schema.name.startswith("aten::_fft"):
        x = call.operands[0]
        whole = {d % x.dim() for d in call.argument("dim")}
        labels: list[Any] = [None if i in whole else i for i in range(x.dim())]
        return DimRule([labels], [labels], linear=(frozenset((0,)),))
    batch = call.operands[0].shape[0]
    tensors = (*call.operands, *(o for o in call.outputs if o is not None))
    if (
        call.target in (aten.im2col.default, aten.col2im.default)
        and call.operands[0].dim() == 3
        and call.target == aten.im2col.default
    ):
        return None
    if any(t.dim() < 3 or t.shape[0] != batch for t in tensors):
        return None
    inputs = [["batch", *([None] * (x.dim() - 1))] for x in call.operands]
    outputs = [
        ["batch", *([None] * (o.dim() - 1))] if o is not None else ["batch"] for o in call.outputs
    ]
    return DimRule(inputs, outputs)


@rule(aten._weight_norm_interface.default, aten._weight_norm_interface_backward.default)
def _weight_norm(call: Call) -> Rule:
    """A function of parameters only: whatever is not whole is made whole or partial first."""
    from spmd.rules.base import Whole

    return Whole()
