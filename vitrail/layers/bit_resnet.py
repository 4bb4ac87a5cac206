"""BiT ResNet: weight-standardized convolutions and GroupNorm. The stem of the hybrid ViTs, and a model by itself."""

from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.layers.layout import Grid, to_tokens

LAYERS = {26: (2, 2, 2, 2), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3), 200: (3, 24, 36, 3)}


def pad_same(x: Tensor, kernel: int, stride: int, value: float = 0.0) -> Tensor:
    """TensorFlow's "SAME" padding; an odd pixel is added at the bottom and right."""
    if kernel == 1:
        return x
    pads = []
    for side in (x.shape[-1], x.shape[-2]):
        total = kernel - stride + (-side % stride if stride > 1 else 0)
        pads += [total // 2, total - total // 2]
    return F.pad(x, pads, value=value)


def standardize(weight: Tensor) -> Tensor:
    """The filters of a convolution with mean 0 and standard deviation 1."""
    mean = weight.mean((1, 2, 3), keepdim=True)
    return (weight - mean) / (weight.std((1, 2, 3), keepdim=True, correction=0) + 1e-5)


class StandardizedConv(nn.Conv2d):
    """A convolution without bias whose filters are standardized to mean 0 and standard deviation 1 in every forward pass."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1):
        super().__init__(inputs, outputs, kernel, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weight = standardize(self.weight.float()).to(x.dtype)
        return F.conv2d(pad_same(x, self.kernel_size[0], self.stride[0]), weight, stride=self.stride)


class Bottleneck(nn.Module):
    """1x1, 3x3 (strided), 1x1, each with GroupNorm; ReLU after the sum; the weight of the last norm is initialized to zero."""

    def __init__(self, inputs: int, inner: int, stride: int, eps: float):
        super().__init__()
        outputs = 4 * inner
        self.conv1, self.norm1 = StandardizedConv(inputs, inner, 1), nn.GroupNorm(32, inner, eps=eps)
        self.conv2, self.norm2 = StandardizedConv(inner, inner, 3, stride), nn.GroupNorm(32, inner, eps=eps)
        self.conv3, self.norm3 = StandardizedConv(inner, outputs, 1), nn.GroupNorm(32, outputs, eps=eps)
        nn.init.zeros_(self.norm3.weight)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(StandardizedConv(inputs, outputs, 1, stride), nn.GroupNorm(32, outputs, eps=eps))

    def forward(self, x: Tensor) -> Tensor:
        branch = self.norm1(self.conv1(x)).relu()
        branch = self.norm2(self.conv2(branch)).relu()
        out: Tensor = (self.shortcut(x) + self.norm3(self.conv3(branch))).relu()
        return out


class ResNetStem(nn.Module):
    """7x7 root convolution, `layers[i]` bottlenecks per stage, then patches of the feature map (`patch` 0: the map itself)."""

    def __init__(self, channels: int, width: int, layers: tuple[int, ...], root: int, patch: int, eps: float = 1e-6):
        super().__init__()
        self.patch, self.layers = patch, layers
        self.root, self.root_norm = StandardizedConv(channels, root, 7, 2), nn.GroupNorm(32, root, eps=eps)
        self.stages = nn.ModuleList()
        inputs = root
        for stage, count in enumerate(layers):
            inner = root * 2**stage
            blocks = nn.Sequential()
            for index in range(count):
                blocks.append(Bottleneck(inputs, inner, 2 if stage and not index else 1, eps))
                inputs = 4 * inner
            self.stages.append(blocks)
        self.proj = nn.Conv2d(inputs, width, patch, patch) if patch else nn.Identity()

    def grid(self, height: int, width: int) -> Grid:
        for _ in range(1 + max(len(self.layers), 1)):
            height, width = -(-height // 2), -(-width // 2)
        return height // max(self.patch, 1), width // max(self.patch, 1)

    def forward(self, image: Tensor) -> Tensor:
        x = self.root_norm(self.root(image)).relu()
        x = F.max_pool2d(pad_same(x, 3, 2, value=float("-inf")), 3, 2)
        for stage in self.stages:
            x = stage(x)
        return to_tokens(self.proj(x))
