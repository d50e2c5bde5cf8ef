"""Run big Mixture-of-Experts GGUF models on small GPUs: every expert placed on its own, by an unpatched llama.cpp."""

__version__ = "0.1.0"
