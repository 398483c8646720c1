"""The devices: where the state and a batch are, and the one sum between `grads` and `apply`."""
