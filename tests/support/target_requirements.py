"""The packages with the compilers for GPUs and TPUs that belong to the JAX that is installed."""

import importlib.metadata


def requirements() -> str:
    """Return them as arguments of pip."""
    version = importlib.metadata.version("jax")
    needs = importlib.metadata.requires("jax") or []
    [libtpu] = {need.partition(";")[0].strip() for need in needs if need.startswith("libtpu")}
    return f"jax-cuda12-plugin=={version} jax-cuda12-pjrt=={version} {libtpu}"


if __name__ == "__main__":
    print(requirements())
