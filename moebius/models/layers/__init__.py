"""A model as a list of layers: values that need neither torch nor anything else of the model."""
