"""The operator half of Weir: runs InferenceDeployments and tunes their live knobs."""

__version__ = "0.1.0"
