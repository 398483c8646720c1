"""A run as one HTML file that needs nothing else: curves, time, bytes, events, settings; nothing
here needs jax.
"""
