"""Which pre-trained networks have a name, and what do they read?"""

from ibaml.backbones.pretrained import DEFAULT, PRETRAINED, BackboneError, Pretrained, pretrained

__all__ = ["DEFAULT", "PRETRAINED", "BackboneError", "Pretrained", "pretrained"]
