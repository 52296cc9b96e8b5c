"""The server half of Weir: an OpenAI-compatible LLM server with continuous batching and live knobs."""

__version__ = "0.1.0"
