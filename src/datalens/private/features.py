"""Features of images by a frozen, public network."""
from typing import Any
DEFAULT = "efficientnet-lite0"
def find(name: str) -> Any: raise NotImplementedError
def extract(extractor: Any, images: Any, *, device: Any) -> Any: raise NotImplementedError
