"""Folders that other programs wrote, as they are: a model of Hugging Face by its path."""
