"""Stand-in for torchvision, which SGLang and transformers import for image inputs."""

from workbench.engine.cpu.absent import stand_in

__version__ = "0.0.0"
__getattr__ = stand_in(__name__)
