"""The typed InferenceDeployment, its conditions and reasons."""
