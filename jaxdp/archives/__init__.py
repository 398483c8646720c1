"""Archives: images as other people pack them, in zip and tar files, in tables of paths, and MedMNIST."""
