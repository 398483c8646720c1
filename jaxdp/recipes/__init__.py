"""Recipes: augmentations of images for training, on the device, and data sets that change another one."""
