"""Checks that this Python has a JAX that Unisono can use, before the modules that need it are imported."""

from __future__ import annotations

from unisono.foundation.installing import install_command

_OLDEST = (0, 5)


def check() -> None:
    """Import JAX.

    Raises:
        ImportError: it is not installed, or too old.
    """
    try:
        import jax
    except ModuleNotFoundError as error:
        if error.name not in ("jax", "jaxlib"):
            raise
        raise ImportError(
            f"unisono.jax needs JAX, and {error.name} is not installed: {install_command('jax')}", name=error.name
        ) from None
    if jax.__version_info__ < _OLDEST:
        raise ImportError(
            f"unisono.jax needs JAX {'.'.join(map(str, _OLDEST))} or newer, and this is JAX {jax.__version__}: "
            "install a newer one by pip install --upgrade jax",
            name="jax",
        )
