"""Which backbones are there? An MLP, Conv4, ResNet-12 and a map from the base classes."""

from ibaml.nn.conv4 import Conv4, conv4
from ibaml.nn.discriminant import Discriminant, discriminant
from ibaml.nn.mlp import mlp
from ibaml.nn.recipe import backbone as backbone
from ibaml.nn.resnet12 import ResNet12, resnet12

# the other is for other rooms, not public (docs/api.md)
__all__ = ["Conv4", "Discriminant", "ResNet12", "conv4", "discriminant", "mlp", "resnet12"]
