"""Conversion: a pretrained transformer gets linear-time attention and keeps its weights."""

from latte.convert.calibration import calibrate
from latte.convert.checkpoint import Conversion, Settings, convert_checkpoint
from latte.convert.latents import new_parameters
from latte.convert.model import convert, restore

__all__ = ["Conversion", "Settings", "calibrate", "convert", "convert_checkpoint", "new_parameters", "restore"]
