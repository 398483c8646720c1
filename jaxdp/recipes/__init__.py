"""Recipes: augmentations of images for training, on the device, and a data set that applies them."""
