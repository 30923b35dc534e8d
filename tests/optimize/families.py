"""One small network of each of torchvision's families, built of torchvision's own blocks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torchvision import models
from torchvision.models import inception
from torchvision.models import swin_transformer as swin
from torchvision.models.convnext import CNBlockConfig, ConvNeXt
from torchvision.models.efficientnet import EfficientNet, FusedMBConvConfig, MBConvConfig
from torchvision.models.googlenet import BasicConv2d, Inception
from torchvision.models.maxvit import MaxVit
from torchvision.models.mobilenetv3 import InvertedResidualConfig, MobileNetV3
from torchvision.models.regnet import BlockParams, RegNet
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet
from torchvision.models.shufflenetv2 import ShuffleNetV2
from torchvision.models.vision_transformer import VisionTransformer


def vit(classes: int = 10) -> nn.Module:
    return VisionTransformer(
        32, patch_size=8, num_layers=2, num_heads=4, hidden_dim=64, mlp_dim=128, num_classes=classes
    )


def swin_v1(classes: int = 10) -> nn.Module:
    """Windows of 4 on 8x8 tokens, shifted in every second block, and on 4x4 tokens, where one window spans all."""
    return swin.SwinTransformer([4, 4], 32, [2, 2], [2, 4], [4, 4], num_classes=classes)


def swin_v2(classes: int = 10) -> nn.Module:
    return swin.SwinTransformer(
        [4, 4],
        32,
        [2, 2],
        [2, 4],
        [4, 4],
        num_classes=classes,
        block=swin.SwinTransformerBlockV2,
        downsample_layer=swin.PatchMergingV2,
    )


def maxvit(classes: int = 10) -> nn.Module:
    return MaxVit((32, 32), 16, 4, [16, 32], [1, 1], 8, 0.0, num_classes=classes)


def convnext(classes: int = 10) -> nn.Module:
    stages = [CNBlockConfig(24, 48, 1), CNBlockConfig(48, None, 1)]
    return ConvNeXt(stages, stochastic_depth_prob=0.1, num_classes=classes)


def densenet(classes: int = 10) -> nn.Module:
    return models.DenseNet(8, (2, 2), 16, num_classes=classes)


def efficientnet(classes: int = 10) -> nn.Module:
    block = partial(MBConvConfig, width_mult=1.0, depth_mult=1.0)
    stages = [FusedMBConvConfig(2, 3, 2, 16, 16, 1), block(2, 3, 2, 16, 24, 1), block(4, 5, 1, 24, 24, 1)]
    return EfficientNet(stages, dropout=0.2, num_classes=classes, last_channel=64)


def mobilenet_v3(classes: int = 10) -> nn.Module:
    block = partial(InvertedResidualConfig, width_mult=1.0)
    stages = [
        block(16, 3, 16, 16, True, "RE", 1, 1),
        block(16, 3, 48, 24, False, "HS", 2, 1),
        block(24, 5, 72, 24, True, "HS", 1, 1),
    ]
    return MobileNetV3(stages, last_channel=64, num_classes=classes)


def regnet(classes: int = 10) -> nn.Module:
    widths = BlockParams(depths=[1, 1], widths=[16, 32], group_widths=[8, 8], bottleneck_multipliers=[1.0, 1.0],
                         strides=[2, 2], se_ratio=0.25)  # fmt: skip
    return RegNet(widths, num_classes=classes)


def vgg(classes: int = 10) -> nn.Module:
    features = models.vgg.make_layers([16, "M", 32, "M", 32, "M"], batch_norm=True)
    network = models.VGG(features, num_classes=classes, init_weights=True)
    network.avgpool = nn.AdaptiveAvgPool2d(2)
    for place, (into, out) in {0: (32 * 4, 128), 3: (128, 128), 6: (128, classes)}.items():
        network.classifier[place] = nn.Linear(into, out)
    return network


def alexnet(classes: int = 10) -> nn.Module:
    network = models.AlexNet(classes)
    network.avgpool = nn.AdaptiveAvgPool2d(2)
    for place, (into, out) in {1: (256 * 4, 128), 4: (128, 128), 6: (128, classes)}.items():
        network.classifier[place] = nn.Linear(into, out)
    return network


def googlenet(classes: int = 10) -> nn.Module:
    return nn.Sequential(
        BasicConv2d(3, 32, kernel_size=7, stride=2, padding=3),
        nn.MaxPool2d(3, 2, ceil_mode=True),
        Inception(32, 16, 16, 32, 8, 16, 16),
        Inception(80, 32, 16, 32, 8, 16, 16),
        nn.MaxPool2d(2, 2, ceil_mode=True),
        Inception(96, 32, 16, 32, 8, 16, 16),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(96, classes)),
    )


def inception_v3(classes: int = 10) -> nn.Module:
    return nn.Sequential(
        inception.BasicConv2d(3, 32, kernel_size=3, stride=2),
        inception.InceptionA(32, 16),  # 64 + 64 + 96 + 16 channels
        inception.InceptionB(240),  # 384 + 96 + 240
        inception.InceptionC(720, 16),  # 4 of 192
        *(nn.AdaptiveAvgPool2d(1), nn.Dropout(), nn.Flatten(), nn.Linear(768, classes)),
    )


#: A family's name and what builds it small; an input has 3 channels and the side that `SIDES` gives, or 32.
FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "alexnet": alexnet,
    "convnext": convnext,
    "densenet": densenet,
    "efficientnet": efficientnet,
    "googlenet": googlenet,
    "inception": inception_v3,
    "maxvit": maxvit,
    "mnasnet": lambda: models.MNASNet(0.35, 10),
    "mobilenet_v2": lambda: models.MobileNetV2(10, 0.35),
    "mobilenet_v3": mobilenet_v3,
    "regnet": regnet,
    "resnet": lambda: ResNet(BasicBlock, [1, 1, 1, 1], 10),
    "resnext": lambda: ResNet(Bottleneck, [1, 1, 1, 1], 10, groups=4, width_per_group=8),
    "shufflenet": lambda: ShuffleNetV2([1, 2, 1], [16, 32, 64, 64, 128], 10),
    "squeezenet": lambda: models.SqueezeNet("1_1", 10),
    "swin": swin_v1,
    "swin_v2": swin_v2,
    "vgg": vgg,
    "vit": vit,
}
#: Those that need larger images. In 32 pixels MobileNetV2 ends in one place: no mean is taken over what rounding adds.
SIDES = {"alexnet": 64, "mobilenet_v2": 64, "squeezenet": 64}


def side(name: str) -> int:
    """Of an input, in pixels."""
    return SIDES.get(name, 32)


def build(name: str, seed: int = 0) -> nn.Module:
    """The small network of a family, of random weights, in eval mode."""
    torch.manual_seed(seed)
    return FAMILIES[name]().eval()
