"""Networks for segmentation by name: our own, and those of segmentation_models_pytorch. In: a name. Out: a source."""
