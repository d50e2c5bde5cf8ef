"""The model that comes with the package: a small trained MoE, described in the README.md beside it."""

from pathlib import Path


def demo_model_path() -> Path:
    """Path of the bundled demo model, a GGUF file of 25.5 MB."""
    return Path(__file__).with_name("demo-moe-Q8_0.gguf")
