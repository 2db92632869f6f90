"""Backbones: an MLP, Conv4 and ResNet-12."""

from ibaml.nn.conv4 import Conv4, conv4
from ibaml.nn.mlp import mlp
from ibaml.nn.recipe import backbone as backbone
from ibaml.nn.resnet12 import ResNet12, resnet12

# the other is for other rooms, not public (docs/api.md)
__all__ = ["Conv4", "ResNet12", "conv4", "mlp", "resnet12"]
